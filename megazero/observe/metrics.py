"""Define one row of metrics per logged step, and compute its values.

A row describes one step; only its rates are means, over the *interval*: the steps since the last logged row.

    step_time               seconds of the interval / its steps
    tokens_per_second       tokens of the interval / its seconds                        (whole run, all devices)
    tokens_per_second_mean  the same over the past of this invocation, see `Smoothed`
    tflops_per_device       tokens_per_second x model FLOPs per token / devices / 1e12  (plan/model.py)
    mfu                     model FLOP/s per device / peak FLOP/s of one device         (PaLM, appendix B)

Validation and saving are not training: the interval leaves their seconds out. On a GPU the host runs ahead of the
device, so a single step's host time means nothing; at a logged step the host has just read the loss, so that the
interval's seconds are the device's too. docs/metrics.md has every key with its unit.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megazero.observe.numbers import Number, Value

# What is another each time the same steps are trained: times, and what the process happened to hold.
TIMING_KEYS = (
    "time",
    "step_time",
    "tokens_per_second",
    "tokens_per_second_mean",
    "tflops_per_device",
    "mfu",
    "memory_peak_bytes",
    "seconds",
)
VALID_LOSS = "valid_loss"  # of the set without a name; "valid_loss.NAME" of the others
HALF_LIFE = 50  # steps after which a step's weight in tokens_per_second_mean is half


@dataclass(frozen=True, kw_only=True)
class Row:
    """The metrics of one logged step. Field order is the order of the keys in metrics.jsonl.

    step counts from 1. time is in seconds since 1970, when the step was done. tokens and samples are those consumed
    since the start of the run (skipped steps consume too), epoch is samples over those of the data set, epochs the same
    of each source that has a name (the key is left out where none has). loss is that
    of this step's batch before its update, in nats per token. grad_norm is unscaled and before the clip, clipped is 1
    where it was beyond the clip. skipped counts all skipped steps so far. comm_bytes are the bytes this rank sent in
    the step. seconds are the host's by phase (`phases.py`).
    """

    step: int
    time: float
    tokens: int
    samples: int
    epoch: float
    epochs: Mapping[str, float] | None
    loss: float
    grad_norm: float
    clipped: int
    lr: float
    loss_scale: float
    skipped: int
    step_time: float
    tokens_per_second: float
    tokens_per_second_mean: float
    tflops_per_device: float
    mfu: float | None
    memory_peak_bytes: int
    comm_bytes: int
    seconds: dict[str, float]


def validated(row: Mapping[str, Value], scores: Mapping[str, tuple[float, float | None]]) -> dict[str, Value]:
    """Return a row with its validations, which come after the training loss.

    Args:
        scores: loss, and bits per byte where the tokenizer is known, by the name of a set; "": it has none.
    """
    found: dict[str, Value] = {}
    for key, value in row.items():
        found[key] = value
        for name, (loss, bits_per_byte) in scores.items() if key == "loss" else ():
            end = f".{name}" if name else ""
            found |= {f"{VALID_LOSS}{end}": loss}
            found |= {} if bits_per_byte is None else {f"valid_bits_per_byte{end}": bits_per_byte}
    return found


def valid_losses(row: Mapping[str, Value]) -> list[str]:
    """Return the keys of a row's validation losses, in order."""
    return [key for key in row if key == VALID_LOSS or key.startswith(f"{VALID_LOSS}.")]


def scalars(row: Mapping[str, Value]) -> dict[str, Number]:
    """Return a row with numbers only, for sinks that need it so: `seconds/data` for data of seconds."""
    found: dict[str, Number] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key}/{inner}": number for inner, number in value.items()}
        else:
            found[key] = value
    return found


@dataclass(frozen=True)
class Rates:
    """Rates over an interval; mfu is None where the device's peak is not known."""

    step_time: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None


def rates(
    steps: int, tokens: int, seconds: float, flops_per_token: float, num_devices: int, peak_flops: float | None
) -> Rates:
    """Return the rates over `steps` steps that consumed `tokens` tokens (of all data ranks) in `seconds` seconds.

    Args:
        flops_per_token: model FLOPs of one training token, forward and backward.
        num_devices: all devices of the run, on all axes.
        peak_flops: peak dense matmul FLOP/s of one device in the compute dtype, or None.
    """
    assert steps > 0 and seconds > 0, f"an interval has steps and takes time: {steps} steps, {seconds} s"
    tokens_per_second = tokens / seconds
    flops_per_device = tokens_per_second * flops_per_token / num_devices
    mfu = None if peak_flops is None else flops_per_device / peak_flops
    return Rates(seconds / steps, tokens_per_second, flops_per_device / 1e12, mfu)


class Interval:
    """Steps, tokens and training seconds since the last logged row.

    Starts its clock when made. `clock` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now."""
        self.steps = 0
        self.tokens = 0
        self._began = self._clock()

    def add_step(self, tokens: int) -> None:
        """Add a step, which consumed this many tokens over all data ranks."""
        self.steps += 1
        self.tokens += tokens

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time spent inside from training time: `with interval.excluded(): validate()`."""
        began = self._clock()
        try:
            yield
        finally:
            self._began += self._clock() - began

    @property
    def seconds(self) -> float:
        """Return the training seconds so far, more than 0: a clock may be too coarse to see one tiny step."""
        return max(self._clock() - self._began, 1e-9)


class Smoothed:
    """The mean of tokens/s over the intervals so far; a step's weight is halved by every HALF_LIFE later steps.

        sum of w tokens / sum of w seconds, w = 2^-(steps since the interval / HALF_LIFE)

    A ratio of sums, so that a slow step counts by its length, and no made-up start is mixed in.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, steps: int, tokens: int, seconds: float) -> float:
        """Add an interval; return the mean with it."""
        fade = 0.5 ** (steps / HALF_LIFE)
        self._tokens = fade * self._tokens + tokens
        self._seconds = fade * self._seconds + seconds
        return self._tokens / self._seconds


def memory_peak_bytes(device: torch.device) -> int:
    """Return the most memory held so far: by torch's allocator on a GPU, by this whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


def reserved_peak_bytes(device: torch.device) -> int:
    """Return the most memory taken from the system so far: by torch's allocator on a GPU, by this process on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else memory_peak_bytes(device)
