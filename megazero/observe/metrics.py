"""Compute the values of a row of metrics.

A row describes one step; only its rates are means, over the *interval*: the steps since the last logged row.

    step_time               seconds of the interval / its steps
    tokens_per_second       tokens of the interval / its seconds                        (whole run, all devices)
    tokens_per_second_mean  mean of tokens_per_second over this invocation so far, see `Smoothed`
    tflops_per_device       tokens_per_second x model FLOPs per token / devices / 1e12  (plan/layers.py)
    mfu                     model FLOP/s per device / peak FLOP/s of one device         (PaLM, appendix B)

Validation and saving are not training: the interval excludes their seconds. On a GPU the host runs ahead of the
device, so a single step's host time means nothing; at a logged step the host has just read the loss, so that the
interval's seconds are the device's too. `Recorder.row` has the keys in order, docs/metrics.md their units.
"""

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megazero.observe.numbers import Number, Value

# Values that differ each time the same steps are trained: times, and the memory that the process holds.
_RATES = ("step_time", "tokens_per_second", "tokens_per_second_mean", "tflops_per_device", "mfu")
TIMING_KEYS = ("time", *_RATES, "memory_peak_bytes", "seconds")
VALID_LOSS, VALID_BITS = "valid_loss", "valid_bits_per_byte"  # of the set without a name; "valid_loss.NAME" of others
EVAL = "eval."  # keys of results on texts and tasks: "eval.NAME.METRIC"
HALF_LIFE = 50  # steps after which a step's weight in tokens_per_second_mean is half


@dataclass(frozen=True)
class Work:
    """The work of one step, for the rates.

    Attributes:
        tokens_per_step: tokens of the global batch.
        flops_per_token: model FLOPs, forward and backward.
        peak_flops: dense matmul FLOP/s of one device in the compute dtype; None where not known.
        device: where this rank runs.
        num_devices: all devices of the run, on all axes.
        before: (steps done, tokens consumed) before, with another batch size or sequence length.
    """

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None
    device: torch.device
    num_devices: int = 1
    before: tuple[int, int] = (0, 0)

    def tokens(self, steps: int) -> int:
        """Return the tokens that the first `steps` steps of the run consume."""
        done, tokens = self.before
        return tokens + (steps - done) * self.tokens_per_step

    def rates(self, steps: int, tokens: int, seconds: float, mean: float) -> dict[str, Value]:
        """Return the rates over `steps` steps that consumed `tokens` tokens (of all data ranks) in `seconds` seconds.

        Args:
            mean: see `Smoothed`.
        """
        assert steps > 0 and seconds > 0, f"an interval has steps and takes time: {steps} steps, {seconds} s"
        flops_per_device = tokens / seconds * self.flops_per_token / self.num_devices
        return {
            "step_time": seconds / steps,
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_mean": mean,
            "tflops_per_device": flops_per_device / 1e12,
            "mfu": None if self.peak_flops is None else flops_per_device / self.peak_flops,
        }


def valid_losses(row: Mapping[str, Value]) -> list[str]:
    """Return the keys of a row's validation losses, in order."""
    return [key for key in row if key == VALID_LOSS or key.startswith(f"{VALID_LOSS}.")]


def results(row: Mapping[str, Value]) -> list[str]:
    """Return the keys of a row's results on texts and tasks, in order."""
    return [key for key in row if key.startswith(EVAL)]


def scalars(row: Mapping[str, Value]) -> dict[str, Number]:
    """Return a row with numbers only, for sinks that need that: `seconds/data` for `data` in `seconds`."""
    found: dict[str, Number] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key}/{inner}": number for inner, number in value.items()}
        else:
            found[key] = value
    return found


class Smoothed:
    """The mean of tokens/s over the intervals so far; a step's weight is halved by every HALF_LIFE later steps.

        sum of w tokens / sum of w seconds, w = 2^-(steps since the interval / HALF_LIFE)

    It is a ratio of sums, so that a slow step counts by its length, and no initial value is mixed in.
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
