"""The tables of docs/memory.md: the paper's configurations, measured and predicted, and beside what the paper says."""

from pathlib import Path

import pytest

from megazero.builders.job import job_of
from megazero.plan.memory import memory
from tests.memory.configurations import (
    CATEGORIES,
    FIGURE_6,
    FIGURE_7,
    LARGEST,
    NAMES,
    V100,
    held,
    measured,
    of_paper,
    published,
    small,
)
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
FEW = (("c2", 2), ("c5", 4))
TOLERANCE = 0.01  # numbers for each token of the loss are not in the formula


@pytest.mark.parametrize(
    ("name", "tensor"),
    [pytest.param(n, t, marks=() if (n, t) == ("c5", 4) else pytest.mark.full) for n in NAMES for t in (2, 4)],
)
def test_a_configuration_takes_what_the_formula_says(name: str, tensor: int) -> None:
    config = small(name, tensor, layers=4)
    found = run_ranks(2 * tensor, held, config, tensor=tensor)[0]
    predicted = memory(job_of(config, 2 * tensor), 0, fused=False).held
    for category in CATEGORIES:
        assert predicted.get(category, 0) == pytest.approx(found.get(category, 0), rel=TOLERANCE), category


@pytest.mark.full
def test_the_measured_table() -> None:
    assert "\n".join(measured()) in PAGE.read_text(encoding="utf-8"), "python -m tests.memory.configurations prints it"


def test_the_table_beside_the_paper() -> None:
    assert "\n".join(published()) in PAGE.read_text(encoding="utf-8"), "python -m tests.memory.configurations prints it"


def test_what_fits_in_the_paper_fits() -> None:
    """Its largest models fit into 32 GB, and of its 170B only C5 does."""
    for sizes, name in FIGURE_6.values():
        assert memory(of_paper(name, sizes), 0, fused=False).peak < V100
    fits = {name: memory(of_paper(name, LARGEST[1]), 0, fused=False).peak < V100 for name in NAMES}
    assert fits == {"c1": False, "c2": False, "c3": False, "c4": False, "c5": True}


def test_what_the_paper_measured_is_more_in_the_same_order() -> None:
    """Its cache holds fragments too: never less than ours, and in one order for each model."""
    for sizes, cached in FIGURE_7.values():
        ours = {name: memory(of_paper(name, sizes), 0, fused=False).peak / 1e9 for name in cached}
        assert all(ours[name] < cached[name] for name in cached)
        assert sorted(ours, key=lambda name: -ours[name]) == sorted(ours, key=lambda name: (-cached[name], name))
