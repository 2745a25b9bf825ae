"""How ranks find each other: a store, a roll call, a process group.

The store is a file where a local parent started the ranks (nothing listens on any network), torchrun's own under
torchrun, and otherwise a server of rank 0 that listens on one address only: of the interface that the user named, or
of the host that all ranks were told to meet at. torch's store would listen on every interface and let anybody write.

The roll call comes before the process group, so that a rank that does not come is named, and so is one that runs other
code or another config.
"""

import fcntl
import json
import os
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from megazero.errors import UserError
from megazero.parallel.agreement import FailedElsewhere
from megazero.parallel.bounce import bounce_pool
from megazero.parallel.launch import Meeting, Place, World, meeting_of_step, stay_on
from megazero.parallel.ledger import Ledger
from megazero.parallel.shared import Box, Mail, host_id, supported
from megazero.parallel.wire import BUCKET, Wire

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of netdevice(7)
_POLL = 0.05  # seconds between looks at the roll


def connect(place: Place, *, timeout: timedelta, fingerprint: str, bucket: int = BUCKET) -> Wire:
    """Meets the other ranks and makes the default process group; a single process meets nobody.

    Args:
        place: of this process.
        timeout: for the meeting, and for every operation afterwards.
        fingerprint: of code and config; must be the same on every rank.
        bucket: see `Wire`.

    Raises:
        UserError: 320, ranks do not come; 321, one runs something else; 322, the address cannot be listened on.
    """
    world = place.world
    if world.size == 1:
        return Wire(timeout=timeout, bucket=bucket, seat=place.seat)
    if place.store is not None:
        stay_on(_loopback())
    try:
        return _connected(place, timeout, fingerprint, bucket)
    except dist.DistError as error:  # rank 0 held the store, and has ended
        if world.rank == 0:
            raise UserError(320, f"the meeting broke up: {error}", "see the other ranks' output", rank=0) from None
        raise FailedElsewhere(0, 320) from None


def _connected(place: Place, timeout: timedelta, fingerprint: str, bucket: int) -> Wire:
    world, store = place.world, _store(place, timeout)
    device = world.device
    on_gpu, backend = device.type == "cuda", "nccl" if device.type == "cuda" and not world.shares_gpus else "gloo"
    mail = _mail(world, timeout) if backend == "gloo" and supported() else None
    roll = _roll_call(store, world, timeout, fingerprint, mail)
    if mail is not None:
        _open_boxes(mail, roll, store, world)
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    ledger = Ledger()
    bounce = bounce_pool(device, ledger) if on_gpu and backend == "gloo" else None
    wire = Wire(backend, timeout, bucket, ledger, mail, place.seat, bounce=bounce)
    if mail is not None:
        wire.ledger.hold("staging", Box.size(world.size))
    return wire


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
        address = address_of(meeting.interface) if meeting.interface else socket.gethostbyname(meeting.host)
        if meeting.nodes > 1 and address.startswith("127."):
            raise OSError(f"{address} cannot be reached from the other {meeting.nodes - 1} hosts")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, meeting.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        what = f"cannot listen on {where}" + (f" ({meeting.interface})" if meeting.interface else "")
        do = "set MASTER_ADDR to this host and MASTER_PORT to a free port"
        raise UserError(322, f"{what}: {error.strerror or error}", do, rank=0) from None
    return listener


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. Raises OSError: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)[20:24])


def _mail(world: World, timeout: timedelta) -> Mail | None:
    try:
        host_id()
        return Mail(world.rank, world.size, timeout)
    except OSError:  # a sandbox without /proc or memfd: sockets do as well
        return None


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@dataclass(frozen=True)
class _Present:
    """What a rank says of itself when it comes."""

    host: str
    fingerprint: str
    host_id: str
    pid: int
    handle: int  # of its outbox; -1: it shares no memory


def _roll_call(
    store: Store, world: World, timeout: timedelta, fingerprint: str, mail: Mail | None
) -> dict[int, _Present]:
    """Waits until every rank has come, each with the same fingerprint; returns what each said."""
    near = (host_id(), os.getpid(), mail.handle) if mail is not None else ("", 0, -1)
    store.set(f"here/{world.rank}", json.dumps([socket.gethostname(), fingerprint, *near]))
    _all_have(store, "here", world, timeout)
    roll = {rank: _Present(*json.loads(store.get(f"here/{rank}"))) for rank in range(world.size)}
    mine, first = roll[world.rank], roll[0]
    odd = [rank for rank, present in roll.items() if present.fingerprint != first.fingerprint]
    if odd:
        store.set(f"read/{world.rank}", "")
        if world.rank == 0:  # which holds the store: without it the others would not know whom to blame
            _all_have(store, "read", world, timeout)
    if odd and odd[0] != world.rank:
        raise FailedElsewhere(odd[0], 321)
    if odd:
        what = f"runs {mine.fingerprint} on {mine.host}, rank 0 {first.fingerprint} on {first.host}"
        raise UserError(
            321, what, "start all ranks from one folder with one config and the same flags", rank=world.rank
        )
    return roll


def _all_have(store: Store, key: str, world: World, timeout: timedelta) -> None:
    """Waits until every rank has set its `key`."""
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(world.size))
    while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
        if time.monotonic() > deadline:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            first = min(set(range(world.size)) - set(missing))
            if first != world.rank:
                raise FailedElsewhere(first, 320)
            what = f"{len(missing)} of {world.size} ranks did not come within {timeout.seconds} s: {shown}"
            raise UserError(320, what, "see their output; are all hosts up, was srun left out?", rank=world.rank)
        time.sleep(_POLL)


def _open_boxes(mail: Mail, roll: dict[int, _Present], store: Store, world: World) -> None:
    """Maps the outboxes of this host's ranks; they are used where every one of them could open all."""
    here = [rank for rank, present in roll.items() if present.host_id == roll[world.rank].host_id]
    try:
        for rank in here:
            if rank != world.rank:
                mail.open(rank, roll[rank].pid, roll[rank].handle)
        opened = True
    except OSError:  # a hardened kernel may forbid it; sockets do as well
        opened = False
    store.set(f"opened/{world.rank}", str(int(opened)))
    store.wait([f"opened/{rank}" for rank in here])
    if all(store.get(f"opened/{rank}") == b"1" for rank in here):
        mail.reached = frozenset(here)
