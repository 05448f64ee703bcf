#include "crc32c.hpp"

#include <array>
#include <cstring>

namespace areal {
namespace {

constexpr std::uint32_t polynomial = 0x82F63B78u;  // bits reversed

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: the effect of byte b followed by k zero bytes ("slicing by 8").
constexpr Tables make_tables() {
    Tables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? polynomial : 0);
        tables[0][byte] = crc;
    }
    for (std::uint32_t byte = 0; byte < 256; ++byte)
        for (int k = 1; k < 8; ++k) {
            const std::uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    return tables;
}

constexpr Tables tables = make_tables();

#if defined(__x86_64__)
// Three independent streams hide the instruction's latency of three cycles; `shift` tables move a stream's
// checksum over the bytes of the streams behind it, which is what appending that many zero bytes does.
constexpr std::size_t lane_bytes = 4096;

// A linear map of 32 bits to 32 bits, by the four bytes of its argument.
struct Shift {
    std::array<std::array<std::uint32_t, 256>, 4> part{};

    std::uint32_t operator()(std::uint32_t crc) const {
        return part[0][crc & 0xFF] ^ part[1][(crc >> 8) & 0xFF] ^ part[2][(crc >> 16) & 0xFF] ^ part[3][crc >> 24];
    }
};

Shift make_shift(std::size_t zero_bytes) {
    std::array<std::uint32_t, 32> image{};  // of each single bit
    for (int bit = 0; bit < 32; ++bit) {
        std::uint32_t crc = std::uint32_t{1} << bit;
        for (std::size_t i = 0; i < zero_bytes; ++i) crc = (crc >> 8) ^ tables[0][crc & 0xFF];
        image[bit] = crc;
    }
    Shift shift;
    for (int byte = 0; byte < 4; ++byte)
        for (std::uint32_t value = 0; value < 256; ++value)
            for (int bit = 0; bit < 8; ++bit)
                if (value >> bit & 1) shift.part[byte][value] ^= image[8 * byte + bit];
    return shift;
}

std::uint64_t word_at(const unsigned char* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(const unsigned char* at, std::size_t bytes,
                                                              std::uint32_t seed) {
    static const Shift one = make_shift(lane_bytes), two = make_shift(2 * lane_bytes);
    std::uint64_t crc = seed ^ 0xFFFFFFFFu;
    for (; bytes >= 3 * lane_bytes; bytes -= 3 * lane_bytes, at += 3 * lane_bytes) {
        std::uint64_t second = 0, third = 0;
        for (std::size_t i = 0; i < lane_bytes; i += 8) {
            crc = __builtin_ia32_crc32di(crc, word_at(at + i));
            second = __builtin_ia32_crc32di(second, word_at(at + lane_bytes + i));
            third = __builtin_ia32_crc32di(third, word_at(at + 2 * lane_bytes + i));
        }
        crc = two(static_cast<std::uint32_t>(crc)) ^ one(static_cast<std::uint32_t>(second)) ^ third;
    }
    for (; bytes >= 8; bytes -= 8, at += 8) crc = __builtin_ia32_crc32di(crc, word_at(at));
    std::uint32_t tail = static_cast<std::uint32_t>(crc);
    for (; bytes; --bytes, ++at) tail = __builtin_ia32_crc32qi(tail, *at);
    return tail ^ 0xFFFFFFFFu;
}
#endif

}  // namespace

std::uint32_t crc32c_table(const void* data, std::size_t bytes, std::uint32_t seed) {
    const auto* at = static_cast<const unsigned char*>(data);
    std::uint32_t crc = seed ^ 0xFFFFFFFFu;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        // byte by byte, so that the result does not depend on the machine's byte order
        crc ^= at[0] | std::uint32_t{at[1]} << 8 | std::uint32_t{at[2]} << 16 | std::uint32_t{at[3]} << 24;
        crc = tables[7][crc & 0xFF] ^ tables[6][(crc >> 8) & 0xFF] ^ tables[5][(crc >> 16) & 0xFF] ^
              tables[4][crc >> 24] ^ tables[3][at[4]] ^ tables[2][at[5]] ^ tables[1][at[6]] ^ tables[0][at[7]];
    }
    for (; bytes; --bytes, ++at) crc = (crc >> 8) ^ tables[0][(crc ^ *at) & 0xFF];
    return crc ^ 0xFFFFFFFFu;
}

bool crc32c_hardware() {
#if defined(__x86_64__)
    static const bool found = __builtin_cpu_supports("sse4.2");
    return found;
#else
    return false;
#endif
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t seed) {
#if defined(__x86_64__)
    if (crc32c_hardware()) return crc32c_sse42(static_cast<const unsigned char*>(data), bytes, seed);
#endif
    return crc32c_table(data, bytes, seed);
}

}  // namespace areal
