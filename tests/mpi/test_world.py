"""The parts of a world that need MPI only: nodes, communicators, torch's meeting points. The whole: test_world.py."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from areal_hpc import communicators, rendezvous
from areal_hpc.config import ConfigError, Parallel
from areal_hpc.placement import Role, place

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def test_main_thread_may_call_mpi(comm: Intracomm) -> None:
    MPI = communicators.initialise()
    assert MPI.Query_thread() >= MPI.THREAD_FUNNELED and MPI.Is_thread_main()


def test_nodes_are_where_memory_is_shared(comm: Intracomm) -> None:
    from mpi4py import MPI

    nodes, local = communicators.map_nodes(comm)
    assert nodes == [MPI.Get_processor_name()] * comm.size
    assert (local.rank, local.size) == (comm.rank, comm.size)
    local.Free()


LAYOUTS = {
    1: [(Parallel(), None)],
    2: [(Parallel(), Parallel()), (Parallel(tp=2), None)],
    4: [(Parallel(dp=2), Parallel(tp=2)), (Parallel(pp=2), Parallel(dp=2)), (Parallel(), Parallel(dp=3))],
}


def test_each_traffic_has_its_communicator(comm: Intracomm) -> None:
    from mpi4py import MPI

    for trainer, rollout in LAYOUTS[comm.size]:
        places = place(["n"] * comm.size, trainer, rollout)
        comms, mine = communicators.split(comm, places), places[comm.rank]
        for a in (comms.mail, comms.control, comms.exchange, comms.comm):
            assert MPI.Comm.Compare(a, comm) == MPI.CONGRUENT
        assert comms.role.rank == mine.index
        assert comms.role.size == (trainer if mine.role is Role.TRAINER else rollout).size
        if mine.role is Role.TRAINER:
            assert comms.replica is None
        else:
            assert (comms.replica.rank, comms.replica.size) == (mine.tp, rollout.tp)
            assert comms.replica.allgather(mine.dp) == [mine.dp] * rollout.tp
        # A message of one kind of traffic is not seen by the others.
        request = comms.mail.isend("mail", comm.rank, tag=1)
        assert not comms.control.Iprobe(comm.rank, 1) and not comms.exchange.Iprobe(comm.rank, 1)
        assert comms.mail.recv(source=comm.rank, tag=1) == "mail"
        request.wait()
        for a in (comms.comm, comms.mail, comms.control, comms.exchange, comms.role, comms.replica):
            if a is not None:
                a.Free()


def test_a_cyclic_world_puts_groups_in_order(world: Intracomm) -> None:
    """Node names as a cyclic distribution gives them: ranks in another order than their places."""
    if world.size % 2:
        pytest.skip("needs ranks for two nodes")
    half = world.size // 2
    places = place(["a", "b"] * half, Parallel(tp=half), Parallel(tp=half))
    comms = communicators.split(world, places)
    assert comms.role.allgather(world.rank) == list(range(world.rank % 2, world.size, 2))
    assert comms.role.allgather(places[world.rank].tp) == list(range(half))


def test_store_is_shared_and_needs_no_port(comm: Intracomm) -> None:
    stores = [rendezvous.torch_store(comm, single_node=True) for _ in range(2)]
    assert len({store.port for store in stores}) == 2
    for n, store in enumerate(stores):
        assert comm.allgather(store.port) == [store.port] * comm.size
        store.set(f"from {comm.rank}", str(n))
        for other in range(comm.size):
            assert store.get(f"from {other}") == str(n).encode()
    comm.Barrier()  # rank 0 serves until all have read


def test_store_on_a_named_interface(comm: Intracomm) -> None:
    store = rendezvous.torch_store(comm, single_node=False, interface="lo")
    assert store.host == "127.0.0.1"
    store.set(str(comm.rank), "here")
    store.wait([str(r) for r in range(comm.size)])
    comm.Barrier()


def test_a_missing_interface_is_said_on_every_rank(comm: Intracomm) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.interface=nope0: no IPv4 address .* its interfaces: .*lo"):
        rendezvous.torch_store(comm, single_node=True, interface="nope0")


def test_gloo_goes_over_the_address_s_interface(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    rendezvous.set_gloo_interface(single_node=True, interface="")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    rendezvous.set_gloo_interface(single_node=True, interface="lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_host_address_is_no_loopback_or_is_refused() -> None:
    try:
        address = rendezvous.host_address()
    except ConfigError as error:  # a machine with loopback only
        assert "cluster.interface" in str(error) and "lo" in str(error)
    else:
        assert not address.startswith("127.") and socket.inet_aton(address)


def test_wait_has_a_deadline(comm: Intracomm) -> None:
    if comm.size == 1:
        communicators.wait(comm.Ibarrier(), "the barrier", 1.0)
        return
    late = comm.size - 1
    if comm.rank == late:
        for other in range(late):
            comm.recv(source=other)  # it has waited in vain
    request = comm.Ibarrier()
    if comm.rank != late:
        with pytest.raises(TimeoutError, match=r"the barrier: not all ranks came within 0\.1 s"):
            communicators.wait(request, "the barrier", 0.1)
        comm.send(None, late)
    communicators.wait(request, "the barrier", 20.0)
