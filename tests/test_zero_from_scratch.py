"""docs/zero_from_scratch.md: its tables are what the script prints, its code is the script's, and both are right."""

import functools
import gc
import re
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from examples.zero_from_scratch import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LEARNING_RATE,
    STEPS,
    TOLERANCE,
    Ranks,
    Report,
    Stage0,
    Stage1,
    Stage2,
    Stage3,
    Unit,
    batch,
    difference,
    held_by,
    layers,
    main,
    measure,
    run_ranks,
    show,
    size_of,
    train,
)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/zero_from_scratch.md").read_text(encoding="utf-8")
SCRIPT = (ROOT / "examples/zero_from_scratch.py").read_text(encoding="utf-8")
STAGES = (Stage0, Stage1, Stage2, Stage3)
PARAMETERS = size_of(*layers())
SMALLEST = min(size_of(layer) for layer in layers())  # far more than a tensor of activations has
SIZES = (2, pytest.param(4, marks=pytest.mark.full))
# In a row of differences what is not 0: another CPU rounds to another.
FIGURE = re.compile(r"(?<=\| )(?!0 )\d[\d.e-]*(?= \|)")


class Forgetful(Stage2):
    """Take this rank's own gradient for the sum."""

    def take(self, unit: Unit, gradient: Tensor) -> None:
        unit.gradients.copy_(self.ranks.mine(gradient))


class Watched(Stage3):
    """Look, before a layer is gathered, for another that is still there as a whole."""

    def weights(self, unit: Unit) -> Tensor:
        rest = {t.data_ptr() for u in self.units for t in (u.parameters, u.gradients, u.master, u.first, u.second)}
        assert settles(lambda: not [1 for at, size in living().items() if at not in rest and size >= 2 * SMALLEST])
        return super().weights(unit)


class Findings(NamedTuple):
    """What one rank found."""

    reports: list[Report]
    beside: list[bool]  # for each stage: tensors rest that no table shows
    of_forgetful: float  # difference in fp64


def living() -> dict[int, int]:
    """Bytes of memory behind all tensors that Python knows, by address."""
    kinds = (Tensor, nn.Parameter)
    tensors = [found for found in gc.get_objects() if type(found) in kinds and found.device.type == "cpu"]
    return {memory.data_ptr(): memory.nbytes() for memory in (tensor.untyped_storage() for tensor in tensors)}


def settles(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true: gloo's threads let go of a message a moment after it has arrived."""
    patience = time.monotonic() + 30
    while not (true := condition()) and time.monotonic() < patience:
        time.sleep(0.01)
    return true


def rest_beside(ranks: Ranks, stage: type[Stage0]) -> bool:
    assert settles(lambda: not living()), "tensors of what was trained before"
    trainer = train(stage, ranks, "bf16")
    expected = sum(held_by(trainer).values())
    return not settles(lambda: sum(living().values()) == expected)


def visit(ranks: Ranks) -> Findings:
    gc.collect()
    gc.freeze()  # what the tests had before is none of this
    reports = measure(ranks)
    train(Watched, ranks, "bf16")
    beside = [rest_beside(ranks, stage) for stage in STAGES]
    one = train(Stage0, Ranks(0, 1), "fp64")
    return Findings(reports, beside, difference(train(Forgetful, ranks, "fp64"), one))


@functools.cache
def findings(size: int) -> list[Findings]:
    return run_ranks(size, visit)


def reports_of(stage: type[Stage0], size: int) -> list[Report]:
    return [found.reports[stage.number] for found in findings(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_the_formula(stage: type[Stage0], size: int):
    for report in reports_of(stage, size):
        assert sum(report.held.values()) == stage.fixed * PARAMETERS + stage.shared * PARAMETERS // size
    assert not any(found.beside[stage.number] for found in findings(size)), "other tensors rest as well"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_elements_sent_are_the_formula(stage: type[Stage0], size: int):
    for report in reports_of(stage, size):
        assert sum(report.sent.values()) == stage.sends * PARAMETERS * (size - 1) // size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_those_of_one_process(stage: type[Stage0], size: int):
    for report in reports_of(stage, size):
        far, of_first, moved = report.differences["fp64"]
        assert 0 < far <= TOLERANCE and of_first == 0 and moved > LEARNING_RATE
        far, of_first, moved = report.differences["bf16"]
        assert 0 < far < moved, "rounding decides less than what is learned"
        assert of_first == 0, "all stages add the same numbers in the same order"


@pytest.mark.parametrize("size", SIZES)
def test_a_forgotten_sum_is_found(size: int):
    assert min(found.of_forgetful for found in findings(size)) > 1e6 * TOLERANCE


def test_one_process_is_plain_torch():
    alone, modules = Stage0(Ranks(0, 1), "fp64"), layers()
    plain = nn.Sequential(*modules).to_empty(device="cpu").double()
    for unit, module in zip(alone.units, modules, strict=True):
        nn.utils.vector_to_parameters(unit.master.clone(), module.parameters())
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY
    )
    for step in range(STEPS):
        x, y = batch(step)
        loss = (plain(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None) < 0.5, "see TOLERANCE"
        assert alone.step(x, y) == pytest.approx(float(loss.detach()), rel=TOLERANCE)
        optimizer.step()
    for unit, module in zip(alone.units, modules, strict=True):
        weights = nn.utils.parameters_to_vector(module.parameters())
        assert float((weights - unit.master).detach().abs().max()) <= TOLERANCE


def test_command_on_one_rank(capsys: pytest.CaptureFixture[str]):
    main(["--ranks", "1"])
    out = capsys.readouterr().out
    assert re.findall(r"^Stage (\d)$", out, re.MULTILINE) == ["0", "1", "2", "3"]
    assert out.count(f" {16 * PARAMETERS:,} | 16 |") == 4 and out.count(" = 16 |") == 4, "nothing to share"


def tables(text: str) -> list[str]:
    """Lines of tables, with a # for each figure that depends on the machine."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [FIGURE.sub("#", row) if row.startswith(("| bf16 |", "| fp64 |")) else row for row in rows]


@pytest.mark.full
def test_tables_of_the_page_are_what_the_script_prints():
    printed = "\n\n".join(show(stage, reports_of(stage, 4)) for stage in STAGES)
    assert tables(PAGE) == tables(printed), f"python examples/zero_from_scratch.py prints:\n{printed}"
    assert f"`Psi = {PARAMETERS:,} parameters in {len(layers())} layers, N = 4 ranks`" in PAGE
    rows = re.findall(r"^\| (bf16|fp64) \| (\S+) \| 0 \| (\S+) \|$", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == ["bf16", "fp64"] * 4
    assert all(float(far) < float(moved) for _, far, moved in rows)
    assert all(float(far) <= TOLERANCE for name, far, _ in rows if name == "fp64")


def test_code_of_the_page_is_the_scripts():
    quoted = re.findall(r"```python\n(.*?)```", PAGE.split("## The same with megazero")[0], re.DOTALL)
    lines = SCRIPT.splitlines()
    assert len(quoted) > 7 and len(lines) < 300
    for block in quoted:
        count = block.count("\n")
        parts = (textwrap.dedent("\n".join(lines[i : i + count])) for i in range(len(lines)))
        assert block.rstrip("\n") in parts, block
