"""Memory of every option of the model: the bytes that blocks keep, exact, and the most of a step, within 1 %."""

from dataclasses import replace

import pytest

from megazero.plan.activations import kept_by_blocks
from megazero.plan.model import Kind, Shape
from tests.layouts import job_on, planned
from tests.model.test_options import CASES as OPTIONS
from tests.plan.test_activations import DTYPES, after_forward
from tests.plan.test_peak import most, walked
from tests.ranks import run_ranks

SIZES = {"hidden": 128, "heads": 4, "ffn": 512, "seq_len": 64, "vocab": 64, "layers": 4}
GRIDS = ((1, False), (2, False), (2, True))
RECOMPUTE = ("none", "selective", "full")


def sized(shape: Shape) -> Shape:
    """The options at sizes for which activations are the most of a step."""
    head = 48 if shape.head_size is not None else None
    rope = [replace(kind.rope, short=(), long=(), kind="plain") if kind.rope else None for kind in shape.kinds]
    kinds = tuple(Kind(kind.window, each) for kind, each in zip(shape.kinds, rope, strict=True))
    kv_heads = 4 if shape.layernorm else min(shape.kv_heads, 2)
    return replace(shape, **SIZES, head_size=head, kinds=kinds, kv_heads=kv_heads, dropout=0.0)


CASES = [(name, GRIDS[i % 3], RECOMPUTE[i // 3 % 3], list(DTYPES)[i % 2 * 2]) for i, name in enumerate(OPTIONS)]
CASES += [("one-key", grid, recompute, "fp32") for grid in GRIDS[1:] for recompute in RECOMPUTE]
CASES += [("qk-norm-full", (2, False), "none", "bf16")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_keep_the_formula(case: tuple) -> None:
    name, (tensor, sequence), recompute, dtype = case
    shape, precision = sized(OPTIONS[name]), DTYPES[dtype]
    layout = job_on(tensor, 1, sequence, 1, recompute=recompute)
    few, many = (
        run_ranks(tensor, after_forward, layout, replace(shape, layers=layers), precision, tensor=tensor)[0]
        for layers in (2, 4)
    )
    assert many - few == kept_by_blocks(planned(layout, shape, precision), range(3, 5))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_most_of_a_step_is_the_formula(case: tuple) -> None:
    name, (tensor, sequence), recompute, dtype = case
    shape, precision = sized(OPTIONS[name]), DTYPES[dtype]
    layout = job_on(tensor, sequence=sequence, recompute=recompute, stage=0)
    measured = run_ranks(tensor, most, layout, shape, precision, tensor=tensor)[0]
    predicted, _ = max(walked(planned(layout, shape, precision), head=True, fused=False))
    assert predicted == pytest.approx(measured, rel=0.01)
