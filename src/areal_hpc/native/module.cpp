// areal_hpc._native: what must not hold the interpreter lock. `native/__init__.py` documents the Python side.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "crc32c.hpp"
#include "files.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// A contiguous buffer held for the length of a call. Raises BufferError (Python's own text) for anything else.
class Buffer {
public:
    Buffer(nb::handle object, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO)) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    void* data() const { return view_.buf; }
    std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
};

template <class Call>
auto without_lock(Call call) {
    nb::gil_scoped_release release;
    return call();
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("crc32c", [](nb::handle buffer, std::uint32_t seed) {
        Buffer b(buffer, false);
        return without_lock([&] { return areal::crc32c(b.data(), b.bytes(), seed); });
    }, "buffer"_a, "seed"_a = 0);
    m.def("crc32c_table", [](nb::handle buffer, std::uint32_t seed) {
        Buffer b(buffer, false);
        return without_lock([&] { return areal::crc32c_table(b.data(), b.bytes(), seed); });
    }, "buffer"_a, "seed"_a = 0);
    m.def("crc32c_hardware", &areal::crc32c_hardware);
    m.def("write_extent", [](const std::string& path, std::int64_t offset, nb::handle buffer) {
        Buffer b(buffer, false);
        return without_lock([&] { return areal::write_extent(path, offset, b.data(), b.bytes()); });
    }, "path"_a, "offset"_a, "buffer"_a);
    m.def("read_extent", [](const std::string& path, std::int64_t offset, nb::handle buffer) {
        Buffer b(buffer, true);
        return without_lock([&] { return areal::read_extent(path, offset, b.data(), b.bytes()); });
    }, "path"_a, "offset"_a, "buffer"_a);
    m.def("reserve", [](const std::string& path, std::int64_t bytes) {
        return without_lock([&] { return areal::reserve(path, bytes); });
    }, "path"_a, "bytes"_a);
    m.def("sync_dir", [](const std::string& directory) {
        return without_lock([&] { return areal::sync_dir(directory); });
    }, "directory"_a);
}
