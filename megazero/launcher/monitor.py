"""Detect in a thread that the operations of a rank's GPU are stuck, and end the process with the reason.

With NCCL no wait of the host has a timeout: it waits for the device until NCCL's own watchdog, which knows nothing of
the other ranks, aborts the process. So process groups get twice `parallel.timeout`, and this thread ends the rank after
0.8 of `parallel.timeout`: the rank publishes the operations that it is stuck in, waits until the others have done so
too, writes its stacks into its log, and ends by the same path as a rank on a CPU.

NCCL's flight recorder has the operations that the host has queued and that have not ended on the device. Each
communicator has the name of its lane there. The parts of coalesced operations, which only other code queues, never end
in the recorder. But operations of one communicator end in order, so one has ended if a later one has.
"""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megazero.base.answers import flush_output
from megazero.comm.axes import LANES, P2P
from megazero.comm.transport.exchange import CollectiveError
from megazero.launcher.environment import RankContext
from megazero.launcher.exit_status import say_why

_SHARE = 0.8  # of the timeout, so that no rank gives up earlier for another reason
_LOOKS = 20  # checks within that time
_LAST = 20  # operations of the flight recorder that the log shows
_WORLD = "default_pg"  # torch's name of the first process group


class Recorded(NamedTuple):
    """An operation that NCCL's flight recorder holds.

    Attributes:
        number: its number among all operations of this process.
        group: the name of its communicator: a lane of the status slot, for a message followed by the other rank.
        kind: for example "nccl:all_reduce".
        ended: whether it has ended on the device.
        text: number in the group, kind, sizes and state.
    """

    number: int
    group: str
    kind: str
    ended: bool
    text: str


class Monitor:
    """The thread that checks whether the operations of a rank make progress.

    They are stuck if some are unfinished, and none has ended and none was queued for 0.8 of the timeout. A rank that
    computes, saves or waits for a disk has nothing unfinished, or its queue changes.

    Args:
        place: the context of the rank.
        timeout: seconds; `parallel.timeout`.
        first_uses: the first uses of communicators that the host is in, where it may wait for other ranks.
        recorder: returns the operations of the flight recorder; with `True` only unfinished ones.

    Attributes:
        clock, sleep, end: functions of the system.
    """

    def __init__(
        self, place: RankContext, timeout: float, first_uses: Sequence[str], recorder: Callable[[bool], list[Recorded]]
    ):
        self._place, self._limit, self._first_uses, self._recorder = place, _SHARE * timeout, first_uses, recorder
        self.clock, self.sleep, self.end = time.monotonic, time.sleep, os._exit
        self._between, self._since = self._limit / _LOOKS, 0.0
        self._under_way: list[int | str] = []

    def start(self) -> None:
        """Check in the background, until the current process group is destroyed."""
        group = weakref.ref(dist.group.WORLD)  # a thread that holds the group could destroy it, at any time
        threading.Thread(target=self._watch, args=(group,), name="monitor", daemon=True).start()

    def is_stuck(self) -> bool:
        """Check the operations once; return whether this rank is stuck."""
        under_way, now = [*(one.number for one in self._recorder(True)), *self._first_uses], self.clock()
        if not under_way or under_way != self._under_way:
            self._under_way, self._since = under_way, now
        return now - self._since >= self._limit and bool(self._first_uses or self._oldest())

    def _oldest(self) -> Sequence[Recorded]:
        """Return the oldest unfinished operation of each communicator that is a lane."""
        found: dict[str, Recorded] = {}
        for one in self._recorder(False):
            if one.ended:
                found.pop(one.group, None)
            elif one.group.partition(" ")[0] in LANES:
                found.setdefault(one.group, one)
        return list(found.values())

    def give_up(self) -> None:
        """Publish what this rank is stuck in, log what is known, report it and end the process."""
        self._place.status_slot.stall(map(_lane, self._oldest()))
        self.sleep(1.0 + 2 * self._between)  # until the others, which check as often, have published theirs
        error = CollectiveError("world", f"no operation queued on the GPU has ended for {self._limit:g} s")
        self._place.stacks.write(error, "\n".join(f"{one.group} {one.text}" for one in self._recorder(False)[-_LAST:]))
        say_why(self._place)
        flush_output()
        self.end(1)

    def _watch(self, group: Callable[[], dist.ProcessGroup | None]) -> None:
        """Check until the group is destroyed; a later group has a monitor of its own."""
        device = self._place.world.device
        # A new thread uses the first device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            while True:
                self.sleep(self._between)
                if not dist.is_initialized() or dist.group.WORLD is not group():
                    return
                if self.is_stuck():
                    self.give_up()
                    return


def flight_recorder(unfinished: bool, dump: Callable[[bool, bool], bytes] | None = None) -> list[Recorded]:
    """Return the operations that NCCL's flight recorder holds, the newest last; none if it is off.

    Args:
        unfinished: return only those that have not ended on the device.
        dump: replaces torch's own function, called as (include operations, only unfinished ones).
    """
    dump = dump or getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    try:
        entries = json.loads(dump(True, unfinished))["entries"] if dump is not None else []
        return [_recorded(entry) for entry in entries]
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):  # a private interface of torch
        return []


def _recorded(entry: dict) -> Recorded:
    group, kind = entry["process_group"][-1], entry["profiling_name"]
    number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
    text = f"#{number} {kind} {entry.get('input_sizes')}: {entry.get('state')}"
    ended = entry.get("state") == "completed"
    return Recorded(entry["record_id"], "world" if group == _WORLD else group, kind, ended, text)


def _lane(one: Recorded) -> tuple[str, range, str]:
    """Return (lane in the status slot, for a message the other rank, kind) of an operation."""
    lane, _, peer = one.group.partition(" ")
    return lane, range(int(peer), int(peer) + 1) if lane == P2P else range(0), one.kind
