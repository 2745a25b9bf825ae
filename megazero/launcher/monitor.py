"""Notice from a thread that what a rank has queued on its GPU does not go on, and end the process with the reason.

On NCCL no wait of the host ends by itself: it waits for the device until NCCL's own watchdog aborts the process, which
knows nothing of the other ranks. So process groups get twice `parallel.timeout`, and this thread ends the rank after
0.8 of it: the rank shows what it is stuck in, waits until the others have done the same, writes its stacks and what
NCCL's flight recorder holds into its log, and leaves by the same path as a rank on a CPU.
"""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megazero.base.answers import flush_output
from megazero.comm.device_queue import DeviceQueue, Queued
from megazero.comm.transport.exchange import CollectiveError
from megazero.launcher.environment import RankContext
from megazero.launcher.exit_status import say_why

_SHARE = 0.8  # of the timeout: before any other rank gives up for another reason
_LOOKS = 40  # within that time
_LONGEST = 1.0  # seconds between two looks
_LAST = 20  # operations of the flight recorder


class Monitor:
    """The thread that looks whether the operations of a rank go on.

    It takes them to hang where none has ended and none was queued for 0.8 of the timeout, while some are unfinished. A
    rank that computes, saves or waits for a disk has nothing unfinished, or its queue moves.

    Args:
        queue: of this rank.
        place: the context of the rank.
        timeout: seconds; `parallel.timeout`.
        clock, sleep, end: of the system, or what stands in for them.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        place: RankContext,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        end: Callable[[int], object] = os._exit,
    ):
        self._queue, self._place, self._limit = queue, place, _SHARE * timeout
        self._clock, self._sleep, self._end = clock, sleep, end
        self._between = min(_LONGEST, self._limit / _LOOKS)
        self._moves, self._since = queue.moves, clock()

    def start(self) -> None:
        """Look in the background, until the process group that is there now is destroyed."""
        group = weakref.ref(dist.group.WORLD)  # a thread that held it would end it, in its own time
        threading.Thread(target=self._watch, args=(group,), name="monitor", daemon=True).start()

    def look(self) -> Sequence[Queued]:
        """Return what this rank is stuck in; nothing as long as it goes on."""
        unfinished, now = self._queue.unfinished(), self._clock()
        if not unfinished or self._queue.moves != self._moves:
            self._moves, self._since = self._queue.moves, now
        return unfinished if now - self._since >= self._limit else ()

    def give_up(self, stuck: Sequence[Queued]) -> None:
        """Show what this rank is stuck in, write down what is known, report it and end the process."""
        self._place.status_slot.stall((one.axis, one.ranks, one.text) for one in stuck)
        self._sleep(1.0 + 2 * self._between)  # until the others, which look as often, have shown the same
        what = f"nothing queued on the GPU has ended for {self._limit:g} s"
        self._place.stacks.write(CollectiveError(stuck[-1].axis, what), "\n".join(flight_recorder()))
        if self._place.world.launcher != "local":  # a parent reads the board itself
            say_why(self._place)
        flush_output()
        self._end(1)

    def _watch(self, group: Callable[[], dist.ProcessGroup | None]) -> None:
        """Look until the group is destroyed: there may be another one by then, with a monitor of its own."""
        device = self._place.world.device
        with (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        ):  # a thread begins with the first one
            while True:
                self._sleep(self._between)
                if not dist.is_initialized() or dist.group.WORLD is not group():
                    return
                if stuck := self.look():
                    self.give_up(stuck)
                    return


def flight_recorder(dump: Callable[..., bytes] | None = None) -> list[str]:
    """Return the last operations that NCCL's flight recorder holds, one a line, the newest last; none where it is off.

    Args:
        dump: stands in for torch's own.
    """
    dump = dump or getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    try:
        entries = json.loads(dump(True, False))["entries"][-_LAST:] if dump is not None else []
        return [_shown(entry) for entry in entries]
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):  # torch makes no promise about it
        return []


def _shown(entry: dict[str, Any]) -> str:
    group = entry.get("process_group", ["?"])[-1]
    number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
    return f"{group} #{number} {entry.get('profiling_name')} {entry.get('input_sizes')}: {entry.get('state')}"
