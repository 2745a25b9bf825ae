"""How ranks find each other: a store, a roll call, a process group.

The store is a file where a local parent started the ranks (nothing listens on any network), torchrun's own under
torchrun, and otherwise a server of rank 0 that listens on one address only: of the interface that the user named, or
of the host that all ranks were told to meet at. torch's store would listen on every interface and let anybody write.

The roll call comes before the process group, so that a rank that does not come is named, and so is one that runs other
code or another config.
"""

import fcntl
import json
import socket
import struct
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from megazero.errors import UserError
from megazero.parallel.launch import Meeting, Place, World, interface_of, meeting_of_step, stay_on
from megazero.parallel.wire import Wire

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of netdevice(7)
_POLL = 0.05  # seconds between looks at the roll


def connect(place: Place, *, timeout: timedelta, fingerprint: str) -> Wire:
    """Meets the other ranks and makes the default process group; a single process meets nobody.

    Args:
        place: of this process.
        timeout: for the meeting, and for every operation afterwards.
        fingerprint: of code and config; must be the same on every rank.

    Raises:
        UserError: 320, ranks do not come; 321, one runs something else; 322, the address cannot be listened on.
    """
    world = place.world
    if world.size == 1:
        return Wire(timeout=timeout, seat=place.seat)
    if place.store is not None:
        stay_on(_loopback())
    store = _store(place, timeout)
    _roll_call(store, world, timeout, fingerprint)
    device, backend = world.device, "nccl" if world.device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return Wire(backend, timeout, seat=place.seat)


def disconnect() -> None:
    """Takes the process group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(place: Place, timeout: timedelta) -> Store:
    world = place.world
    if place.store is not None:
        store: Store = FileStore(str(place.store), world.size)
    elif world.launcher == "torchrun":
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    else:
        store = _step_store(world, meeting_of_step(), timeout)
    store.set_timeout(timeout)
    return store


def _step_store(world: World, meeting: Meeting, timeout: timedelta) -> Store:
    """Rank 0 serves, on one address; the others are its clients."""
    if world.rank == 0:
        listener = _listen(meeting)
        handle = listener.detach()  # the store closes it
        return TCPStore(
            meeting.host, meeting.port, world.size, True, timeout, wait_for_workers=False, master_listen_fd=handle
        )
    try:
        return TCPStore(meeting.host, meeting.port, world.size, False, timeout)
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:80]
        what = f"rank 0 cannot be reached at {meeting.host}:{meeting.port} within {timeout.seconds} s ({reason})"
        raise UserError(320, what, "is it running? set MASTER_ADDR and MASTER_PORT", rank=world.rank) from None


def _listen(meeting: Meeting) -> socket.socket:
    where = f"{meeting.host}:{meeting.port}"
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        address = _address(meeting.interface) if meeting.interface else socket.gethostbyname(meeting.host)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, meeting.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        what = f"cannot listen on {where}" + (f" ({meeting.interface})" if meeting.interface else "")
        do = "set MASTER_ADDR to this host and MASTER_PORT to a free port"
        raise UserError(322, f"{what}: {error.strerror or error}", do, rank=0) from None
    return listener


def _address(interface: str) -> str:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)[20:24])


def _loopback() -> str:
    named = interface_of()
    return named or next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _roll_call(store: Store, world: World, timeout: timedelta, fingerprint: str) -> None:
    """Waits until every rank has come, each with the same fingerprint."""
    store.set(f"here/{world.rank}", json.dumps([socket.gethostname(), fingerprint]))
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(world.size))
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            what = f"{len(missing)} of {world.size} ranks did not come within {timeout.seconds} s: {shown}"
            raise UserError(320, what, "see their output; are all hosts up?", rank=world.rank)
        time.sleep(_POLL)
    host, first = json.loads(store.get("here/0"))
    if first != fingerprint:
        what = f"runs {fingerprint} on {socket.gethostname()}, rank 0 {first} on {host}"
        raise UserError(321, what, "start all ranks from one folder with one config", rank=world.rank)
