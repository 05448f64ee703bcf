#include "files.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

namespace areal {
namespace {

constexpr std::size_t call_bytes = std::size_t{1} << 30;  // Linux moves less than 2 GiB per call

template <class Call>
auto retried(Call call) {
    auto result = call();
    while (result < 0 && errno == EINTR) result = call();
    return result;
}

// An open file that is closed on every path. `close` reports what the destructor cannot: network file systems
// tell of a quota only then.
class File {
public:
    File(const std::string& path, int flags) : fd_(retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); })) {}
    ~File() {
        if (fd_ >= 0) ::close(fd_);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    int fd() const { return fd_; }
    bool open() const { return fd_ >= 0; }
    int close() {
        const int result = ::close(fd_);
        fd_ = -1;
        return result < 0 && errno != EINTR ? errno : 0;  // Linux has closed it even after EINTR
    }

private:
    int fd_;
};

}  // namespace

int write_extent(const std::string& path, std::int64_t offset, const void* data, std::size_t bytes) {
    File file(path, O_WRONLY);
    if (!file.open()) return errno;
    const auto* at = static_cast<const char*>(data);
    while (bytes) {
        const ssize_t done =
            retried([&] { return ::pwrite(file.fd(), at, std::min(bytes, call_bytes), static_cast<off_t>(offset)); });
        if (done < 0) return errno;
        if (done == 0) return EIO;  // no progress and no reason: never loop on it
        at += done;
        offset += done;
        bytes -= static_cast<std::size_t>(done);
    }
    if (retried([&] { return ::fsync(file.fd()); }) < 0) return errno;
    return file.close();
}

int read_extent(const std::string& path, std::int64_t offset, void* data, std::size_t bytes) {
    File file(path, O_RDONLY);
    if (!file.open()) return errno;
    auto* at = static_cast<char*>(data);
    while (bytes) {
        const ssize_t done =
            retried([&] { return ::pread(file.fd(), at, std::min(bytes, call_bytes), static_cast<off_t>(offset)); });
        if (done < 0) return errno;
        if (done == 0) return ENODATA;
        at += done;
        offset += done;
        bytes -= static_cast<std::size_t>(done);
    }
    return file.close();
}

int reserve(const std::string& path, std::int64_t bytes) {
    File file(path, O_WRONLY | O_CREAT);
    if (!file.open()) return errno;
    // not posix_fallocate: where the file system cannot reserve, that one writes zeros over all of it
    if (bytes > 0 && retried([&] { return ::fallocate(file.fd(), 0, 0, static_cast<off_t>(bytes)); }) < 0) return errno;
    return file.close();
}

int sync_dir(const std::string& directory) {
    File file(directory, O_RDONLY | O_DIRECTORY);
    if (!file.open()) return errno;
    if (retried([&] { return ::fsync(file.fd()); }) < 0) return errno;
    return file.close();
}

}  // namespace areal
