// Reading, writing, reserving and syncing of file ranges, with an errno for an answer. No HDF5, MPI or Python here:
// these calls may run in any thread, and a full disk is a number that ranks can agree on instead of a hang.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace areal {

// Every function returns 0 or the errno of the first call that failed; EINTR is tried again.

// Writes all bytes at `offset` of the existing file `path`, then syncs it.
int write_extent(const std::string& path, std::int64_t offset, const void* data, std::size_t bytes);

// Fills `data` from `offset` of `path`; ENODATA where the file ends before that.
int read_extent(const std::string& path, std::int64_t offset, void* data, std::size_t bytes);

// Allocates disk blocks for the first `bytes` bytes of `path`, which is made if need be and never shortened.
// EOPNOTSUPP where the file system cannot reserve (NFS before 4.2).
int reserve(const std::string& path, std::int64_t bytes);

// Makes renames and new names in `directory` survive a crash of the machine.
int sync_dir(const std::string& directory);

}  // namespace areal
