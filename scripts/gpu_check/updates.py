"""Compare optimizers and 16-bit state on the device with the CPU, and measure their steps.

One process trains the model of `layouts.py` with each of `RULES`, on the device with fused kernels and on the CPU with
the reference. Stochastic rounding uses equal bits on both, but a value that differs by its last bit may be rounded
differently, by 2^-8 of it: so state in 16 bits is compared in bf16, by its losses and norms. Then GPT-2 1.5B is trained
with some rules: Muon's products show in its step time, the bytes of state in its memory.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megazero.comm.grid import single
from scripts.gpu_check.findings import Asked, Row
from scripts.gpu_check.kernels import missing
from scripts.gpu_check.layouts import Case, exact, train
from scripts.gpu_check.ranks import alone_on, row_of
from scripts.gpu_check.steps import GPT, ours

Rule = tuple[str, dict[str, dict[str, Any]]]  # a dtype and options
RULES: dict[str, Rule] = {
    "adamw": ("fp32", {}),
    "muon": ("fp32", {"optimizer": {"name": "muon"}}),
    "lion": ("fp32", {"optimizer": {"name": "lion"}}),
    "moments bf16": ("bf16", {"optimizer": {"moments": "bf16"}}),
    "muon, 16 bits": ("bf16", {"optimizer": {"name": "muon"}}),
    "no masters, moments bf16": ("bf16", {"optimizer": {"moments": "bf16"}, "precision": {"masters": "none"}}),
}
MEASURED = ("adamw", "muon", "no masters, moments bf16")


def rows(asked: Asked) -> Iterator[Row]:
    """Yield the differences of each rule from a CPU."""
    if (absent := missing(asked.device)) is not None:
        yield absent
        return
    exact(asked.device)
    for name, (dtype, options) in RULES.items():
        case = Case(name, dtype=dtype, options=options)
        plain = train(case, single(), torch.device("cpu"))
        yield row_of(case, alone_on(replace(case, kernels="fused"), asked), plain, exact=False)


def measured(asked: Asked) -> Iterator[Row]:
    """Yield the steps of GPT-2 1.5B with some rules."""
    for name in MEASURED:
        yield from ours(GPT.of(asked), asked, [8], name=f"{name}, ", options=RULES[name][1])
