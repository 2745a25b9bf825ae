"""Measure local ranks, all of them at once, as they compute in training; the slowest rank's figure counts.

Ranks are forked, so the calling process must not have computed anything or touched a GPU. Each rank writes its
measurements to its own file, line by line, so that they remain if the rank ends early.

The bandwidth of a collective is the bytes that a rank sends by the ring formula (`comm/ledger.py`) per second; its
latency is the time of one over a single number for each rank.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.comm.collectives import CollectiveError, all_reduce, start_all_gather_in_place
from megazero.comm.grid import Axis, make_grid, single
from megazero.comm.nccl import synchronize
from megazero.launcher.environment import RankContext
from megazero.launcher.rendezvous import connect, disconnect
from megazero.launcher.spawn import run_local
from megazero.launcher.world import World
from megazero.tools.doctor.finding import reason
from megazero.tools.doctor.speed import (
    DTYPES,
    attention_flops,
    copy_bandwidth,
    host_bandwidth,
    launch_seconds,
    matmul_flops,
    seconds_of,
)

SHARED, SOCKETS, NCCL = "shared memory", "sockets", "NCCL"
Figures = dict[str, float]
_Line = tuple[str, Figures, str]

_TALKERS = 2  # ranks that measure messages where fewer compute
_TIMEOUT = timedelta(seconds=120)  # on a busy machine operations of milliseconds take seconds
_MESSAGE = 16 << 20  # bytes of the full tensor of a collective; on GPUs `_GPU_TIMES` as many
_GPU_TIMES = 16
_FEW, _MANY = 7, 60  # repetitions: of long and of short operations
_TRAINS = {"cpu": "fp32", "cuda": "bf16"}  # the dtype in which a model is mostly trained
_COPY = {"cpu": 256 << 20, "cuda": 1 << 30}  # bytes, where there is room: more than any cache holds


@dataclass(frozen=True)
class Measured:
    """The measurements of all ranks.

    Attributes:
        size: number of ranks.
        values: name -> figures of the slowest rank: `flops`, `bandwidth`, `latency`.
        faults: name -> why it has no figures.
        broken: why the ranks ended early, in one line; "" if they did not.
    """

    size: int
    values: dict[str, Figures]
    faults: dict[str, str]
    broken: str = ""


class _HostWorld(World):
    """A world whose ranks compute on the CPU, even if there are GPUs."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class _Notes:
    """The file of one rank: (name, figures, why there are none) in each line."""

    def __init__(self, path: Path):
        self._path = path

    def add(self, name: str, figures: Figures, fault: str = "") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([name, figures, fault]) + "\n")

    def add_result(self, name: str, figure: str, measure: Callable[[], float]) -> None:
        """Add the figure of a measurement that needs no other rank, or why it failed."""
        try:
            self.add(name, {figure: measure()})
        except Exception as error:  # a dtype that this device cannot multiply, no memory: the others go on
            self.add(name, {}, reason(error))

    def read(self) -> list[_Line]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []


def measure(size: int, room: int, *, on_gpus: bool) -> tuple[Measured, Measured]:
    """Return the measurements of (messages between ranks on the CPU, `size` devices), by the same ranks if possible.

    Args:
        room: bytes of the host's memory that are free.
    """
    devices = _in_ranks(size, _gpu_rank if on_gpus else partial(_host_rank, room // size))
    return (devices if size > 1 and not on_gpus else _in_ranks(_TALKERS, partial(_host_rank, None))), devices


def _in_ranks(size: int, main: Callable[[RankContext, _Notes], None]) -> Measured:
    """Run `main` in forked ranks; return the slowest figures that they noted, even if they ended early."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="megazero-doctor-") as folder:
        notes = [_Notes(Path(folder) / f"{number}") for number in range(size)]

        def rank(place: RankContext) -> None:
            try:
                main(place, notes[place.world.rank])
            except (UserError, CollectiveError):
                raise
            except Exception as error:  # an unusual machine, not a bug here
                raise UserError(340, reason(error), "see `megazero doctor`'s other lines") from None

        code = run_local(size, rank, lambda statuses, line: lines.append(line))
        if code > 128:  # this process passed a signal on
            raise SystemExit(code)
        return _slowest([each.read() for each in notes], "".join(lines))


def _slowest(ranks: list[list[_Line]], broken: str) -> Measured:
    """Return the slowest figures over all ranks: the lowest rates, the longest times."""
    values: dict[str, Figures] = {}
    faults: dict[str, str] = {}
    for name in dict.fromkeys(line[0] for rank in ranks for line in rank):
        lines = [line for rank in ranks for line in rank if line[0] == name]
        if len(lines) < len(ranks) or not all(figures for _, figures, _ in lines):
            faults[name] = next((fault for *_, fault in lines if fault), broken or "not measured on all ranks")
            continue
        values[name] = {
            figure: (max if figure == "latency" else min)(figures[figure] for _, figures, _ in lines)
            for figure in lines[0][1]
        }
    return Measured(len(ranks), values, faults, broken)


def _host_rank(room: int | None, place: RankContext, notes: _Notes) -> None:
    """Measure how fast a rank computes, then messages through shared memory and through sockets.

    Args:
        room: bytes of memory that are free for the rank; None: measure messages only.
    """
    world, device = place.world, torch.device("cpu")
    axis = _axis(replace(place, world=_HostWorld(world.rank, world.size, world.local_rank, world.launcher)), device)
    notes.add("threads", {"count": torch.get_num_threads()})
    if room is not None:
        _compute(axis, device, notes, min(_COPY["cpu"], room // 8))
    if axis.size > 1:
        shared_memory = axis.comm.shared_memory
        if shared_memory is not None and shared_memory.reached.issuperset(axis.ranks):
            _collectives(axis, device, SHARED, notes, _MESSAGE)
        else:
            notes.add(SHARED, {}, "needs Linux on x86-64, and ranks that see each other's /proc")
        _collectives(replace(axis, comm=replace(axis.comm, shared_memory=None)), device, SOCKETS, notes, _MESSAGE)
    disconnect()


def _gpu_rank(place: RankContext, notes: _Notes) -> None:
    device = place.world.device
    if device.type != "cuda":
        raise UserError(340, "torch sees a GPU that it cannot use", "is the driver as new as torch's CUDA version?")
    axis = _axis(place, device)
    free, total = torch.cuda.mem_get_info(device)
    notes.add("memory", {"bytes": total})
    size = min(_COPY["cuda"], free // 8)
    _compute(axis, device, notes, size)
    notes.add_result("host copy", "bandwidth", lambda: host_bandwidth(size // 4, device))
    if axis.size > 1:
        _collectives(axis, device, NCCL, notes, _GPU_TIMES * _MESSAGE)
    disconnect()


def _axis(place: RankContext, device: torch.device) -> Axis:
    comm = connect(place, timeout=_TIMEOUT, fingerprint="")
    if place.world.size == 1:
        return single(comm)["data"]
    return make_grid(comm=comm, device_type=device.type)["data"]


def _compute(axis: Axis, device: torch.device, notes: _Notes, size: int) -> None:
    trains = _TRAINS[device.type]
    measures = [(f"matmul {name}", "flops", partial(matmul_flops, dtype, device)) for name, dtype in DTYPES.items()]
    measures.append((f"attention {trains}", "flops", partial(attention_flops, DTYPES[trains], device)))
    measures.append(("launch", "latency", partial(launch_seconds, device)))
    measures.append(("memory copy", "bandwidth", partial(copy_bandwidth, size, device)))
    for measure in measures:
        _meet(axis, device)
        notes.add_result(*measure)


def _meet(axis: Axis, device: torch.device) -> None:
    """Wait for all ranks, so that they start the next measurement together."""
    all_reduce(torch.zeros(1, device=device), axis, "doctor")
    synchronize(device)


def _collectives(axis: Axis, device: torch.device, road: str, notes: _Notes, size: int) -> None:
    """Measure the collectives, each repeated equally often on all ranks; a failure on one rank ends all ranks.

    Args:
        road: name of the transport, for the notes.
        size: bytes of the message for the bandwidth.
    """
    _meet(axis, device)
    short = torch.zeros(axis.size, device=device)
    long = torch.zeros(size // short.element_size() // axis.size * axis.size, device=device)
    sent, taken, slower = 0, 0.0, 0.0
    for name, operation in _OPERATIONS.items():
        latency = _median(lambda op=operation: op(short, axis), device, _MANY)
        before = axis.comm.ledger.bytes_sent
        seconds = _median(lambda op=operation: op(long, axis), device, _FEW)
        once = (axis.comm.ledger.bytes_sent - before) // (_FEW + 1)
        notes.add(f"{road} {name}", {"bandwidth": once / seconds, "latency": latency})
        sent, taken, slower = sent + once, taken + seconds, max(slower, latency)
    notes.add(road, {"bandwidth": sent / taken, "latency": slower})


def _median(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the median seconds of `times` calls, after a warm-up call."""
    work()
    return statistics.median(seconds_of(work, device) for _ in range(times))


_OPERATIONS: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "all-reduce": lambda x, axis: all_reduce(x, axis, "doctor"),
    "all-gather": lambda whole, axis: start_all_gather_in_place(whole, axis, "doctor").wait(),
}
