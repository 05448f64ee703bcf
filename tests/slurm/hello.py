"""Four ranks on two nodes: what a job of this project asks of Slurm, PMIx and MPI, before it is one."""

import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
local = world.Split_type(MPI.COMM_TYPE_SHARED)
places = world.gather((MPI.Get_processor_name(), local.rank))
data = bytearray(1 << 20)
if world.rank == 0:  # a message between the nodes, larger than what travels eagerly
    world.Send(bytes(range(256)) * 4096, world.size - 1)
    print(sorted(places))
elif world.rank == world.size - 1:
    world.Recv(data, 0)
    assert data == bytes(range(256)) * 4096
world.Barrier()
sys.exit(0)
