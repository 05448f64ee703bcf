// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78): the checksum of file blocks and of exchanged boxes.
// Source: RFC 3720, appendix B.4 (test vectors).
#pragma once
#include <cstddef>
#include <cstdint>

namespace areal {

// The checksum of `bytes` bytes at `data`, continued from `seed` (the checksum of what came before; 0 at the start).
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t seed);

// The same without the CPU's instruction; tests compare the two.
std::uint32_t crc32c_table(const void* data, std::size_t bytes, std::uint32_t seed);

// True where `crc32c` runs on the CPU's own instruction.
bool crc32c_hardware();

}  // namespace areal
