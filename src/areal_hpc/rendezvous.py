"""Meeting points of torch's process groups, agreed over MPI: no port to choose, no race.

The owner (rank 0 of a communicator) binds port 0 and keeps the listening socket, which the
store then serves; the address travels by MPI. Source: torch 2.13, TCPStore, master_listen_fd.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from areal_hpc.config import ConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import TCPStore

SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
LOOPBACK = "127.0.0.1"
STORE_TIMEOUT_S = 300.0


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface. Raises ConfigError naming key and interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            there = ", ".join(known for _, known in socket.if_nameindex())
            raise ConfigError(
                f"cluster.interface={name}: no IPv4 address on {socket.gethostname()} ({error.strerror}); "
                f"its interfaces: {there}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def host_address() -> str:
    """This host's address as other nodes see it: of its name, or of its default route.

    Raises ConfigError when both are only loopback: then `cluster.interface` must say it.
    """
    found = []
    with suppress(OSError):  # a name that does not resolve: the route decides
        found.append(socket.gethostbyname(socket.gethostname()))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # documentation address (RFC 5737): sends nothing, picks the route
        found.append(probe.getsockname()[0])
    for address in found:
        if not address.startswith("127."):
            return address
    raise ConfigError(
        f"cluster.interface: {socket.gethostname()} has no address that other nodes can reach "
        f"(found {', '.join(found) or 'none'}); name the interface, one of "
        + ", ".join(name for _, name in socket.if_nameindex())
    )


def address_for(single_node: bool, interface: str) -> str:
    """The address that the ranks of a communicator can reach this host at."""
    if interface:
        return interface_address(interface)
    return LOOPBACK if single_node else host_address()


def set_gloo_interface(single_node: bool, interface: str) -> None:
    """Tell gloo which interface to use, before torch is imported.

    By itself it takes the host name's address, which need not resolve, or is loopback on
    some distributions even where there are several nodes. A value set by the user stays.
    """
    address = address_for(single_node, interface)
    names = [name for _, name in socket.if_nameindex() if _has(name, address)]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def _has(name: str, address: str) -> bool:
    try:
        return interface_address(name) == address
    except ConfigError:
        return False


def torch_store(comm: Intracomm, single_node: bool, interface: str = "") -> TCPStore:
    """A store of all ranks of `comm`, for a torch process group of theirs. Collective over `comm`.

    Rank 0 serves it as long as it keeps the returned object. Raises ConfigError on every rank
    when rank 0 has no address.
    """
    from torch.distributed import TCPStore

    listener, found = None, None
    if comm.rank == 0:
        try:
            listener = socket.create_server((address_for(single_node, interface), 0), backlog=max(128, comm.size))
            found = listener.getsockname()[:2]
        except (ConfigError, OSError) as error:
            found = error
    found = comm.bcast(found, 0)
    if isinstance(found, Exception):
        raise ConfigError(f"torch store of {comm.size} ranks: {found}")
    owner: dict[str, Any] = {"is_master": True, "master_listen_fd": listener.detach()} if listener else {}
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    return TCPStore(found[0], found[1], comm.size, timeout=timeout, wait_for_workers=False, **owner)
