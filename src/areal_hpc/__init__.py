"""AReaL on MPI, Slurm and HDF5: asynchronous reinforcement learning as an HPC application."""

__version__ = "0.1.0"
