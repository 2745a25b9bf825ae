"""Open the key-value store through which the ranks of a job meet, and limit the time that it may take.

The store is a file if a local parent started the ranks, torchrun's own under torchrun, and under srun a TCPStore that
rank 0 serves on one address: that of the interface that the user named, or of the host where all ranks meet.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from megazero.base.answers import flush_output
from megazero.base.errors import UserError
from megazero.launcher.environment import Meeting, RankContext, attempt, master, meeting_of_step, step

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of netdevice(7)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two looks at the store
_LISTEN = "set MASTER_ADDR to this host and MASTER_PORT to a free port"
_START = "start all ranks with one launcher; for a single process, unset RANK, WORLD_SIZE and LOCAL_RANK"
_ATTEMPT = 1.0  # seconds of one attempt to connect


def open_store(place: RankContext, timeout: timedelta) -> Store:
    """Return the store of a rank's job.

    Args:
        timeout: the limit for rank 0 to listen, and of every later operation.

    Raises:
        UserError: 320, rank 0 cannot be reached or, on rank 0, not all ranks connected; 322, rank 0 cannot listen.
    """
    world, where = place.world, ""
    try:
        if place.store is not None:
            store: Store = FileStore(str(place.store), world.size)
        elif world.launcher == "torchrun":
            where = master()
            lasting, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
            store = PrefixStore(f"attempt {attempt()}", lasting)
        else:
            meeting = meeting_of_step()
            where = f"{meeting.host}:{meeting.port}"
            store = _served(meeting, timeout) if world.rank == 0 else _reached(meeting, timeout)
            store = PrefixStore(step(), store)  # ranks of another job with the same port see none of these keys
    except dist.DistError as error:
        reason = " ".join(str(error).split())[:80]
        if "EADDRINUSE" in str(error):
            raise UserError(322, f"cannot listen on {where}: another process listens there", _LISTEN, rank=0) from None
        who = "rank 0 cannot be reached at" if world.rank else f"not all {world.size} ranks connected to"
        what = f"{who} {where} within {timeout.total_seconds():g} s ({reason})"
        raise UserError(320, what, _START, rank=world.rank) from None
    store.set_timeout(timeout)
    return store


def until(ready: Callable[[], bool], seconds: float) -> bool:
    """Poll `ready` until it is true; return False if it is not in time. Signals are handled between two polls."""
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while not ready():
        if (left := deadline - time.monotonic()) <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


@contextlib.contextmanager
def deadline(seconds: float, last: Callable[[], object]) -> Iterator[None]:
    """End the process with exit code 1, after a call of `last`, if the block takes longer.

    If the process that serves the store is stopped, a client waits for its answer in C++ with no timeout.
    """

    def end() -> None:
        last()
        flush_output()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # no thread is left


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises OSError: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)[20:24])


def _served(meeting: Meeting, timeout: timedelta) -> Store:
    """Serve a store on one address of this host. Raises UserError 322: it cannot listen there."""
    try:
        host = address_of(meeting.interface) if meeting.interface else meeting.host
        addresses = socket.getaddrinfo(host, meeting.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(addresses, key=lambda found: found[0] != socket.AF_INET)
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if found.is_unspecified:
            raise OSError("it stands for all addresses of this host")
        if meeting.nodes > 1 and found.is_loopback:
            raise OSError(f"{found} cannot be reached from the other {meeting.nodes - 1} hosts")
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        interface = f" ({meeting.interface})" if meeting.interface else ""
        what = f"cannot listen on {meeting.host}:{meeting.port}{interface}: {getattr(error, 'strerror', '') or error}"
        raise UserError(322, what, _LISTEN, rank=0) from None
    host, port = listener.getsockname()[:2]
    serve = {"is_master": True, "master_listen_fd": listener.detach()}
    return TCPStore(host, port, timeout=timeout, wait_for_workers=False, **serve)


def _reached(meeting: Meeting, timeout: timedelta) -> Store:
    """Connect to the store of rank 0, which may start later. Raises DistError: it cannot be reached in time."""

    def listens() -> bool:  # torch's own client does not handle signals while it tries
        try:
            socket.create_connection((meeting.host, meeting.port), _ATTEMPT).close()
            return True
        except (OSError, UnicodeError):
            return False

    if not until(listens, timeout.total_seconds()):
        raise dist.DistNetworkError("nothing listens there")
    return TCPStore(meeting.host, meeting.port, timeout=timeout, wait_for_workers=False)
