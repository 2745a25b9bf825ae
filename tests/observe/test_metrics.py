"""Rows keep the contract's keys, rates keep their equations."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megazero.comm.ledger import Ledger
from megazero.observe.metrics import HALF_LIFE, Smoothed, Work, memory_peak_bytes
from megazero.observe.numbers import Value
from megazero.observe.phases import PhaseSeconds
from megazero.observe.profile import Profile
from megazero.observe.recorder import Recorder
from megazero.observe.sinks import Sinks

# docs and scripts rely on these names and this order
KEYS = [
    "step",
    "time",
    "tokens",
    "samples",
    "epoch",
    "epochs",
    "loss",
    "grad_norm",
]
KEYS += ["clipped", "lr", "loss_scale", "skipped", "step_time", "tokens_per_second", "tokens_per_second_mean"]
KEYS += ["tflops_per_device", "mfu", "memory_peak_bytes", "comm_bytes", "seconds"]


def row() -> dict[str, Value]:
    """Return the row that a recorder makes of a step."""
    work = Work(64, 1e9, None, torch.device("cpu"))
    recorder = Recorder(Sinks([]), Profile(1, 0, Path()), work, Ledger(), lambda peak: None, PhaseSeconds())
    with recorder.step(1):
        pass
    numbers: dict[str, Value] = {"samples": 2, "epoch": 0.5, "epochs": {"web": 0.5}, "loss": 4.0, "grad_norm": 1.0}
    numbers |= {"clipped": 0, "lr": 1e-3, "loss_scale": 1.0, "skipped": 0}
    return recorder.row(1, numbers)


def test_keys_are_the_contract_in_its_order():
    assert list(row()) == KEYS


def rates(steps: int, tokens: int, seconds: float, work: Work) -> dict[str, float]:
    found = work.rates(steps, tokens, seconds, mean=1.0)
    return {key: value for key, value in found.items() if isinstance(value, float)}


@given(st.integers(1, 50), st.integers(1, 10**9), st.floats(1e-3, 1e5), st.floats(1, 1e13), st.integers(1, 4096))
def test_rates_are_their_equations(steps, tokens, seconds, flops_per_token, num_devices):
    found = rates(steps, tokens, seconds, Work(64, flops_per_token, 989e12, torch.device("cpu"), num_devices))
    assert found["step_time"] * steps == pytest.approx(seconds)
    assert found["tokens_per_second"] * seconds == pytest.approx(tokens)
    assert found["tflops_per_device"] * 1e12 * num_devices * seconds == pytest.approx(tokens * flops_per_token)
    assert found["mfu"] * 989 == pytest.approx(found["tflops_per_device"])


def test_smoothed_speed_is_a_mean_by_length_that_forgets():
    smoothed = Smoothed()
    assert smoothed.add(1, 100, 1.0) == 100.0
    fade = 0.5 ** (1 / HALF_LIFE)
    assert smoothed.add(1, 100, 3.0) == pytest.approx((fade * 100 + 100) / (fade * 1.0 + 3.0))
    for _ in range(20):
        found = smoothed.add(HALF_LIFE, 700, 1.0)
    assert found == pytest.approx(700.0, rel=1e-3)


def test_memory_peak_of_a_process_grows_with_what_it_holds():
    before = memory_peak_bytes(torch.device("cpu"))
    held = torch.ones(128 * 2**20, dtype=torch.uint8)
    grown = memory_peak_bytes(torch.device("cpu"))
    assert 2**25 < before <= grown
    assert grown >= held.numel()
