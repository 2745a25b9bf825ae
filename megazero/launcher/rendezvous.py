"""Connect the ranks: a store, a roll call, a process group.

The store is a file where a local parent started the ranks (nothing listens on any network), torchrun's own under
torchrun, and otherwise one of rank 0 (`store/client.py`), which listens on one address only, of the interface that the
user named or of the host that all ranks meet at, and answers only the ranks of this step. torch's store would listen on
every interface and let any process write.

The roll call comes before the process group, so that a rank that does not come is named, and so is one that runs other
code or another config.
"""

import contextlib
import fcntl
import os
import socket
import struct
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _abort_process_group
from torch.distributed.rendezvous import rendezvous

from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.context import BUCKET, CommContext
from megazero.comm.device_queue import DeviceQueue
from megazero.comm.ledger import Ledger
from megazero.comm.nccl import options
from megazero.comm.processes import Process, host_id
from megazero.comm.transport.host_staging import staging_pool
from megazero.comm.transport.shared_memory import Outbox, SharedMemoryTransport, supported
from megazero.launcher.attendance import NOWHERE, Presence
from megazero.launcher.environment import (
    Meeting,
    RankContext,
    World,
    attempt,
    host_name,
    master,
    meeting_of_step,
    secret_of_step,
    stay_on,
)
from megazero.launcher.exit_status import flush_output
from megazero.launcher.job_board import job_board
from megazero.launcher.lobby import Lobby
from megazero.launcher.monitor import Monitor
from megazero.launcher.roll_call import call_roll
from megazero.store import addresses
from megazero.store.channel import Refused
from megazero.store.client import JobStore, NoAnswer
from megazero.store.server import StoreServer

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of netdevice(7)
_ABORT = 10.0  # seconds for NCCL to give its communicators up


def connect(
    place: RankContext,
    *,
    timeout: timedelta,
    fingerprint: str,
    start_timeout: timedelta | None = None,
    bucket: int = BUCKET,
    shared_memory: bool = True,
) -> CommContext:
    """Meet the other ranks and make the default process group; a single process meets none.

    Args:
        place: the context of this process.
        timeout: for every operation.
        fingerprint: of code and config; must be the same on every rank.
        start_timeout: for the ranks to come to the roll call; None: `timeout`.
        bucket: see `CommContext`.
        shared_memory: ranks of one host exchange through memory, where the system allows it; otherwise through sockets.

    Raises:
        UserError: 311, a rank stopped answering; 320, ranks do not come; 321, one runs other code or config; 322, the
            address cannot be listened on; 323, this rank has another token than rank 0.
    """
    world = place.world
    if world.size == 1:
        return CommContext(timeout=timeout, bucket=bucket, status_slot=place.status_slot)
    if place.store is not None:
        stay_on(_loopback())
    try:
        return _connected(place, timeout, start_timeout or timeout, fingerprint, bucket, shares=shared_memory)
    except NoAnswer as error:
        if world.rank != 1:
            raise FailedElsewhere(1, 320) from None
        what = f"did not answer at the roll call: {error}; rank 1 waited"
        raise UserError(320, what, "is its process stopped, its host cut off?", rank=0) from None
    except dist.DistError as error:  # rank 0 held the store, and has ended
        if world.rank == 0:
            raise UserError(320, f"the meeting broke up: {error}", "see the other ranks' output", rank=0) from None
        raise FailedElsewhere(0, 320) from None


def _connected(
    place: RankContext, timeout: timedelta, start_timeout: timedelta, fingerprint: str, bucket: int, *, shares: bool
) -> CommContext:
    world, store = place.world, _store(place, start_timeout)
    device = world.device
    on_gpu, backend = device.type == "cuda", "nccl" if device.type == "cuda" and not world.shares_gpus else "gloo"
    shared_memory = _shared_memory(world, timeout) if shares and backend == "gloo" and supported() else None
    mine = _presence(fingerprint, shared_memory)
    roll = call_roll(store, world.rank, world.size, start_timeout.total_seconds(), mine)
    store.set_timeout(timeout)  # all ranks are there
    lobby = Lobby(store, world.rank, roll)
    with lobby.together("shared memory"):
        if place.store is None:  # else the local parent has made a board for all
            place.status_slot.move(job_board(store, world.rank, roll), world.rank)
        if shared_memory is not None:
            _open_outboxes(shared_memory, lobby)
    if on_gpu:
        torch.cuda.set_device(device)
    # NCCL's own watchdog ends the process without a word about who is missing: it comes after ours.
    group_timeout = 2 * timeout if backend == "nccl" else timeout
    with lobby.together("process group"):
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=group_timeout,
            device_id=device if backend == "nccl" else None,
            pg_options=options(group_timeout, few_ctas=True) if backend == "nccl" else None,
        )
    ledger = Ledger()
    staging = staging_pool(device, ledger) if on_gpu and backend == "gloo" else None
    queue = DeviceQueue() if backend == "nccl" else None
    if queue is not None:
        Monitor(queue, place, timeout.total_seconds()).start()
    comm = CommContext(
        backend,
        group_timeout,
        bucket,
        ledger,
        shared_memory,
        place.status_slot,
        queue,
        host_staging=staging,
        together=lobby.together,
    )
    if shared_memory is not None:
        comm.ledger.hold("staging", Outbox.size(world.size))
    return comm


def disconnect() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_at_once(code: int) -> None:
    """End a process that failed while it was connected through NCCL, whose clean-up would wait for the others.

    Returns where there is nothing to wait for: no process group, or one of gloo.

    Args:
        code: the exit code.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    aborting = threading.Thread(target=_abort_process_group, daemon=True)  # which may wait for the device
    aborting.start()
    aborting.join(_ABORT)
    flush_output()
    os._exit(code)


def _store(place: RankContext, timeout: timedelta) -> Store:
    world = place.world
    if place.store is not None:
        store: Store = FileStore(str(place.store), world.size)
    elif world.launcher == "torchrun":
        store = PrefixStore(f"attempt {attempt()}", _store_of_torchrun(world, timeout))
    else:
        store = _step_store(world, meeting_of_step(), timeout)
    store.set_timeout(timeout)
    return store


def _store_of_torchrun(world: World, timeout: timedelta) -> Store:
    """Return torch's store. Raises UserError 320, 322: ranks do not come, or rank 0 cannot listen."""
    try:
        lasting, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            what = f"cannot listen on {master()}: another process does"
            raise UserError(
                322, what, "set MASTER_PORT, or --master-port of torchrun, to a free port", rank=0
            ) from None
        seconds = timeout.total_seconds()
        what = f"rank 0 did not answer at {master()} within {seconds:g} s"
        if world.rank == 0:
            what = f"not all {world.size} ranks came to {master()} within {seconds:g} s"
        do = "start all ranks with torchrun; if this is to be one process, unset RANK, WORLD_SIZE and LOCAL_RANK"
        raise UserError(320, what, do, rank=world.rank) from None
    return lasting


def _step_store(world: World, meeting: Meeting, timeout: timedelta) -> Store:
    """Return a client of the store that rank 0 serves, on one address."""
    addresses.host("the host to meet at", meeting.host)  # also where it came from SLURM's node list
    key = secret_of_step().key()
    listener = _listen(meeting) if world.rank == 0 else None
    host, port = (meeting.host, meeting.port) if listener is None else listener.getsockname()[:2]
    server = None if listener is None else StoreServer(listener, key)
    try:
        return JobStore(host, port, key, timeout, server)
    except Refused as error:
        what = f"at {host}:{port}: {error}"
        do = "export one MEGAZERO_TOKEN to all tasks, or give all hosts the same home; is it this job's rank 0?"
        raise UserError(323, what, do, rank=world.rank) from None
    except dist.DistError as error:
        reason = str(error).splitlines()[0][:80]
        what = f"rank 0 cannot be reached at {host}:{port} within {timeout.seconds} s ({reason})"
        raise UserError(320, what, "is it running? set MASTER_ADDR and MASTER_PORT", rank=world.rank) from None


def _listen(meeting: Meeting) -> socket.socket:
    where = f"{meeting.host}:{meeting.port}"
    listener: socket.socket | None = None
    try:
        family, address = _own_address(meeting)
        listener = socket.socket(family, socket.SOCK_STREAM)
        if meeting.nodes > 1 and address.startswith("127."):
            raise OSError(f"{address} cannot be reached from the other {meeting.nodes - 1} hosts")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, meeting.port))
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        what = f"cannot listen on {where}" + (f" ({meeting.interface})" if meeting.interface else "")
        do = "set MASTER_ADDR to this host and MASTER_PORT to a free port"
        raise UserError(322, f"{what}: {error.strerror or error}", do, rank=0) from None
    return listener


def _own_address(meeting: Meeting) -> tuple[int, str]:
    """Return the family and the address that rank 0 listens on. Raises OSError: there is none."""
    return (socket.AF_INET, address_of(meeting.interface)) if meeting.interface else addresses.resolved(meeting.host)[0]


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises OSError: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)[20:24])


def _shared_memory(world: World, timeout: timedelta) -> SharedMemoryTransport | None:
    try:
        host_id()
        return SharedMemoryTransport(world.rank, world.size, timeout)
    except OSError:  # a sandbox without /proc or memfd: sockets do as well
        return None


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _presence(fingerprint: str, shared_memory: SharedMemoryTransport | None) -> Presence:
    """Return this rank's description for the roll call."""
    own, near = Process.own(), ""
    with contextlib.suppress(OSError):  # the system does not say
        near = host_id()
    handle = NOWHERE if shared_memory is None else shared_memory.handle
    return Presence(host_name(), fingerprint, own.pid, own.started, near, handle)


def _open_outboxes(shared_memory: SharedMemoryTransport, lobby: Lobby) -> None:
    """Map the outboxes of this host's ranks; use them only if every one of these ranks could map all."""
    store, roll, own = lobby.store, lobby.roll, lobby.rank
    here = [rank for rank, there in roll.items() if there.host_id == roll[own].host_id]
    try:
        for rank in here:
            if rank != own:
                shared_memory.open(rank, roll[rank].handle)
        opened = True
    except OSError:  # a hardened kernel may forbid it, or it is not what was announced; sockets do as well
        opened = False
    store.set(f"opened/{own}", str(int(opened)))
    if all(said == b"1" for said in store.multi_get([f"opened/{rank}" for rank in here])):
        shared_memory.reached = frozenset(here)
