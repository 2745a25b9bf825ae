"""Connect the ranks: a store, a roll call, a process group."""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megazero.base.answers import flush_output
from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.context import BUCKET, CommContext
from megazero.comm.ledger import Ledger
from megazero.comm.nccl import options
from megazero.comm.processes import host_id
from megazero.comm.status_board import STUCK
from megazero.comm.transport.exchange import CollectiveError
from megazero.comm.transport.host_staging import staging_pool
from megazero.comm.transport.shared_memory import Outbox, SharedMemoryTransport, supported
from megazero.launcher.environment import RankContext, host_name, stay_on
from megazero.launcher.exit_status import say_why
from megazero.launcher.job_board import JobBoard
from megazero.launcher.meeting import SLACK, Presence, call_roll, unanswered
from megazero.launcher.monitor import Monitor, flight_recorder
from megazero.launcher.store import deadline, open_store, until


def connect(
    place: RankContext,
    *,
    timeout: timedelta,
    fingerprint: str,
    start_timeout: timedelta | None = None,
    bucket: int = BUCKET,
    shared_memory: bool = True,
) -> CommContext:
    """Connect to the other ranks and make the default process group; a single process makes none.

    Args:
        place: the context of this process.
        timeout: the limit of every operation.
        fingerprint: a text that identifies code and config; must be the same on every rank.
        start_timeout: the limit of the roll call; None: `timeout`.
        bucket: see `CommContext`.
        shared_memory: ranks of one host exchange through memory, if the system allows it; otherwise through sockets.

    Raises:
        UserError: 320, ranks are missing; 321, one runs other code or config; 322, rank 0 cannot listen at its address.
        CollectiveError: a rank stopped answering after the roll call.
    """
    world = place.world
    if world.size == 1:
        return CommContext(timeout=timeout, bucket=bucket, status_slot=place.status_slot)
    if place.store is not None:
        stay_on(next(name for _, name in socket.if_nameindex() if name.startswith("lo")))
    on_gpu = world.device.type == "cuda"
    backend = "nccl" if on_gpu and not world.shares_gpus else "gloo"
    # NCCL's own watchdog ends the process without naming the rank at fault, so it must act after `Monitor`.
    group_timeout = 2 * timeout if backend == "nccl" else timeout
    transport = _transport_of(world.rank, world.size, timeout) if shared_memory and backend == "gloo" else None
    store, roll = _meet(place, start_timeout or timeout, _presence(fingerprint, transport))
    store.set_timeout(timeout)  # all ranks are connected
    together = partial(_together, place, group_timeout.total_seconds())
    ledger, first_uses = Ledger(), list[str]()
    if transport is not None:
        ledger.hold("staging", Outbox.size(world.size))
        with together("shared memory"):
            _open_outboxes(transport, store, roll, timeout.total_seconds())
    if on_gpu:
        torch.cuda.set_device(world.device)
    with together("process group"):
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=group_timeout,
            device_id=world.device if backend == "nccl" else None,
            pg_options=options(group_timeout, few_ctas=True) if backend == "nccl" else None,
        )
    if backend == "nccl":
        Monitor(place, timeout.total_seconds(), first_uses, flight_recorder).start()
    staging = staging_pool(world.device, ledger) if on_gpu and backend == "gloo" else None
    slot = place.status_slot
    return CommContext(
        backend, group_timeout, bucket, ledger, transport, slot, first_uses, host_staging=staging, together=together
    )


def disconnect() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_at_once(code: int) -> None:
    """End a process that failed while it was connected through NCCL, whose clean-up would wait for the others.

    Do nothing without a process group, or with one of gloo, which has nothing to wait for.

    Args:
        code: the exit code.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        flush_output()
        os._exit(code)


def _meet(place: RankContext, start_timeout: timedelta, mine: Presence) -> tuple[Store, Sequence[Presence]]:
    """Open the store, hold the roll call, and give ranks access to each other's status; return store and roll."""
    rank, size, seconds = place.world.rank, place.world.size, start_timeout.total_seconds()
    try:
        with deadline(seconds + SLACK, lambda: unanswered(place)):
            store = open_store(place, start_timeout)
        with deadline(2 * (seconds + SLACK), lambda: unanswered(place)):
            roll = call_roll(store, rank, size, seconds, mine)
            if place.store is None:  # else the local parent has made a board for all ranks
                place.status_slot.move(JobBoard(store, rank, roll), rank)
            return store, roll
    except RuntimeError as error:  # torch's: rank 0 served the store, and has ended
        if rank == 0:
            raise UserError(320, f"the rendezvous failed: {error}", "see the other ranks' output", rank=0) from None
        raise FailedElsewhere(0, 320) from None


@contextlib.contextmanager
def _together(place: RankContext, seconds: float, what: str) -> Iterator[None]:
    """Show a step of the start, in which all ranks wait for each other, as an operation of the world.

    Args:
        seconds: how long an operation waits for the others.

    Raises:
        CollectiveError: it failed.
    """

    def give_up() -> None:  # torch waits in C++ with no timeout
        place.status_slot.set_state(STUCK, "world")
        say_why(place)

    place.status_slot.begin("world", range(place.world.size), what)
    try:
        with deadline(2 * seconds + SLACK, give_up):
            yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError("world", f"{what}: {error}") from None
    place.status_slot.end("world")


def _transport_of(rank: int, size: int, timeout: timedelta) -> SharedMemoryTransport | None:
    """Return this rank's transport through shared memory; None if the system forbids it: sockets are used."""
    with contextlib.suppress(OSError):  # a sandbox without memfd
        return SharedMemoryTransport(rank, size, timeout) if supported() else None
    return None


def _presence(fingerprint: str, shared_memory: SharedMemoryTransport | None) -> Presence:
    """Return this rank's description for the roll call."""
    outbox = None if shared_memory is None else shared_memory.descriptor
    return Presence(host_name(), fingerprint, os.getpid(), host_id(), outbox)


def _open_outboxes(
    shared_memory: SharedMemoryTransport, store: Store, roll: Sequence[Presence], seconds: float
) -> None:
    """Map the outboxes of this host's ranks; use them only if every one of these ranks could map all."""
    own = shared_memory.rank
    here = {rank: there for rank, there in enumerate(roll) if there.host_id == roll[own].host_id}
    try:
        for rank, there in here.items():
            if there.outbox is None:
                raise OSError("it has no outbox")
            if rank != own:
                shared_memory.open(rank, there.pid, there.outbox)
        opened = True
    except (OSError, ValueError):  # a hardened kernel may forbid it; use sockets then
        opened = False
    store.set(f"opened/{own}", str(int(opened)))
    keys = [f"opened/{rank}" for rank in here]
    if not until(lambda: store.check(keys), seconds):  # torch's own wait does not handle signals
        raise RuntimeError("a rank of this host did not answer")
    if all(said == b"1" for said in store.multi_get(keys)):
        shared_memory.reached = frozenset(here)
