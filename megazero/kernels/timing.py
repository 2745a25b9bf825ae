"""Time calls on a device: the median over rounds in which several systems take turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_ROUND_S = 0.01  # seconds of one system in one round, about
_ROUNDS = 9
_MOST = 200  # calls of one system in one round, at most


def medians(runs: Sequence[Callable[[], Any]], device: torch.device) -> list[float | str]:
    """Return the median seconds of each call, or its error as text if it raises."""
    counts: list[int | str] = []
    for run in runs:
        try:
            for _ in range(3):
                run()
            counts.append(max(1, min(_MOST, int(_ROUND_S / seconds(run, 3, device)))))
        except Exception as error:  # a compiler error, or too little GPU memory: go on with the others
            counts.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        for run, count, column in zip(runs, counts, found, strict=True):
            if isinstance(count, int):
                column.append(seconds(run, count, device))
    return [count if isinstance(count, str) else statistics.median(c) for count, c in zip(counts, found, strict=True)]


def seconds(run: Callable[[], Any], times: int, device: torch.device) -> float:
    """Return the mean seconds of one of `times` calls that are queued together."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begin) / times
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(times):
        run()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / 1e3 / times
