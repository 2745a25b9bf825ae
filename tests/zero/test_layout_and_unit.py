"""Flat units: intervals that cover the buffer, parameters and gradients that are views of it."""

import math
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.base.quantized import BLOCK
from megazero.builders.units import build_units, resources_of
from megazero.comm.grid import Axis
from megazero.comm.ledger import Ledger
from megazero.kernels.operations import REFERENCE, Operations
from megazero.kernels.select import choose
from megazero.model.transformer import Transformer
from megazero.optim.groups import Groups
from megazero.plan.placements import ALIGNMENT
from megazero.zero.gradients import DeliveryCounter, GradientAccumulator
from megazero.zero.layout import Entry, Group, lay_out
from megazero.zero.placement import STAGES, Precision, UnitAxes
from megazero.zero.unit import Unit
from tests.model.small import GPT, LLAMA, batch, make, step_of

CPU = torch.device("cpu")
KINDS = [(True, True, False), (False, True, False), (False, False, False), (False, False, True)]
# (decay, split, partial): what decays is a matrix, and split
entries = st.lists(
    st.builds(
        lambda name, shape, kind: Entry(name, shape, Group(float(kind[0])), kind[1], partial=kind[2]),
        st.uuids().map(str),
        st.tuples(st.integers(1, 9), st.integers(1, 9)),
        st.sampled_from(KINDS),
    ),
    min_size=1,
)


@given(entries, st.sampled_from([ALIGNMENT, BLOCK]))
def test_intervals_cover_the_buffer_once_decayed_first(given_entries: list[Entry], alignment: int) -> None:
    layout = lay_out("unit", given_entries, alignment)
    assert sorted(i.name for i in layout.intervals) == sorted(e.name for e in given_entries)
    ends = [0, *(i.stop for i in layout.intervals)]
    gaps = [i.start - end for i, end in zip(layout.intervals, ends, strict=False)]
    decayed = next((start for group, start in layout.groups if not group.decay), layout.aligned)
    assert decayed % alignment == 0 and all(0 <= gap < alignment for gap in gaps)
    assert all(i.start % alignment == 0 for i in layout.intervals) and layout.padded(3) % (3 * alignment) == 0
    assert layout.numel == sum(math.prod(e.shape) for e in given_entries) + sum(gaps) == ends[-1]
    kinds = {e.name: (e.group.decay, e.split, e.partial) for e in given_entries}
    partial = layout.aligned if layout.tp_partial is None else layout.tp_partial
    for interval in layout.intervals:
        places = interval.stop <= decayed, interval.stop <= layout.tp_replicated, interval.start >= partial
        assert places == kinds[interval.name]
        assert interval.stop - interval.start == torch.Size(interval.shape).numel()
    # the model's order is kept within each group
    for kind in KINDS:
        names = [e.name for e in given_entries if (e.group.decay, e.split, e.partial) == kind]
        assert [i.name for i in layout.intervals if kinds[i.name] == kind] == names


def built(shape, dtype=torch.float64):
    model = Transformer(shape, seed=0, tensor=Axis("tensor"), sequence=False, ops=REFERENCE)
    axes, ledger = UnitAxes(Axis("shard"), Axis("tensor")), Ledger()
    names = [name for name, _ in model.units()]
    precision = Precision(dtype, dtype)
    resources = resources_of(precision, CPU, ledger)
    return model, build_units(model, names, Groups("adamw", 0.1), seed=0, axes=lambda unit: axes, resources=resources)


def test_the_model_lives_in_the_units_memory() -> None:
    for shape in (GPT, LLAMA):
        model, units = built(shape)
        parameters = dict(model.named_parameters())
        for unit in units:
            first = unit.resting.parameters.values.data_ptr()
            for interval in unit.layout.intervals:
                parameter = parameters[interval.name]
                assert parameter.data_ptr() == first + interval.start * parameter.element_size()
                assert parameter.is_contiguous()
        for name, parameter in make(shape, torch.float64).named_parameters():
            assert torch.equal(parameters[name], parameter), name  # the same initial values as without units


def test_a_tied_weight_is_one_memory() -> None:
    model, units = built(GPT)
    assert model.head.weight is model.embedding.tokens.weight
    assert units[0].layout.name == "tied"
    assert model.head.weight.data_ptr() == units[0].resting.parameters.values.data_ptr()


def test_gradients_in_units_equal_autograd_s_bit_for_bit() -> None:
    """Over two micro-batches: overwriting first, adding after, nothing zeroed."""
    for shape in (GPT, LLAMA):
        model, units = built(shape, torch.float32)
        twin = make(shape, torch.float32)
        for step in range(2):  # a second step must not see what the first left
            for unit in units:
                unit.gradients.forget()
            twin.zero_grad(set_to_none=True)
            for micro in range(2):
                for unit in units:
                    unit.gradients.deliveries.micro_batch = 2 * step + micro
                each = batch(shape, 2, seed=10 * step + micro)
                model.losses(*each, step_of(2, micro)).sum().backward()
                twin.losses(*each, step_of(2, micro)).sum().backward()
            expected = {name: p.grad for name, p in twin.named_parameters()}
            for unit in units:
                for interval in unit.layout.intervals:
                    gradient = unit.resting.gradients.values[interval.start : interval.stop].view(interval.shape)
                    # a product added by the matmul itself rounds once less than product plus add
                    bound = 2e-6 * expected[interval.name].abs().max()
                    assert (gradient - expected[interval.name]).abs().max() <= bound, interval.name
            assert all(p.grad is None for p in model.parameters())


def slot_of(name: str, ops: Operations) -> GradientAccumulator:
    """Return the gradient of a parameter whose memory is always there."""
    return GradientAccumulator(DeliveryCounter("owner"), name, ops, lambda: None)


def test_first_delivery_overwrites_later_ones_add() -> None:
    memory = torch.full((3, 4), torch.nan)
    view = slot_of("weight", REFERENCE)
    view.view = memory
    for _ in range(5):
        view.expect()
    left, right = torch.randn(3, 5), torch.randn(5, 4)
    view.add_product(left, right)
    assert torch.equal(memory, left @ right)
    rows, values = torch.tensor([2, 0, 2]), torch.randn(3, 4)
    view.add_rows(rows, values)
    expected = left @ right
    for row, value in zip(rows, values, strict=True):
        expected[row] += value
    assert torch.allclose(memory, expected)
    view.add(torch.ones(3, 4))
    assert torch.allclose(memory, expected + 1)
    for first in (lambda: view.add(torch.ones(3, 4)), lambda: view.add_rows(torch.arange(3), torch.ones(3, 4))):
        memory.fill_(torch.nan)
        view.fresh = True
        first()
        assert torch.equal(memory, torch.ones(3, 4))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_rows_is_delivered_as_the_sum_would_be(dtype: torch.dtype, deferred: bool) -> None:
    """Bit for bit in fp32, the first and a second one, of wide and narrow rows, at once and later."""
    each = [torch.randn(1000, 7).to(dtype) for _ in range(2)]
    found = []
    for by_rows in (True, False):
        view = slot_of("bias", REFERENCE)
        view.view = torch.full((7,), torch.nan)
        later = view.counter.deferred = deque() if deferred else None
        for _ in each:
            view.expect()
        for rows in each:
            view.add_sum(rows) if by_rows else view.add(rows.sum(0, dtype=torch.float32))
        for delivery in later or ():
            delivery()
        found.append(view.view)
    assert torch.equal(*found) and not found[0].isnan().any()


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_gathered_wide(kernels: str, dtype: torch.dtype) -> None:
    memory = torch.full((37, 5), torch.nan)
    view = slot_of("weight", choose(kernels, torch.device("cpu"), dtype))
    view.view = memory
    for _ in range(4):
        view.expect()
    plain, turned = torch.randn(37, 5).to(dtype), torch.randn(5, 37).to(dtype).T
    left, right = torch.randn(37, 3).to(dtype), torch.randn(3, 5).to(dtype)
    view.add(turned)
    assert torch.equal(memory, turned.float())
    view.add(plain)
    view.add_product(left, right)
    expected = turned.float() + plain.float() + (left @ right).float()
    assert torch.equal(memory, expected)
    view.fresh = True
    view.add(plain)
    assert torch.equal(memory, plain.float())


def test_a_parameter_that_nothing_reached_has_a_zero_gradient() -> None:
    _, units = built(GPT)
    for unit in units:
        unit.resting.gradients.values.fill_(torch.nan)
        unit.gradients.forget()
        unit.gradients.close()
        assert not unit.resting.gradients.values.any()


class Calls(TorchDispatchMode):
    """The operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_buffer_that_has_been_seen_needs_no_new_views() -> None:
    """Of a unit in stage 3 with two parts: the second time parameters and gradients are shown without slicing."""
    layout = lay_out("unit", [Entry("a", (4, 8), Group(decay=0.1), True), Entry("b", (32,), Group(decay=0.1), True)])
    shard = Axis("shard", 2)
    resources = resources_of(Precision(), CPU, Ledger())
    unit = Unit(layout, UnitAxes(shard, Axis("tensor"), STAGES[3]), resources)
    parameters = unit.parameters.make()
    whole = resources.wholes.take(unit.numel)
    for seen in (False, True):
        whole.copy_(torch.arange(unit.numel) + seen)
        with Calls() as calls:
            unit.parameters.install(whole)
            unit.gradients.open()
        assert [name for name in calls.names if name in ("slice", "view")] == [] or not seen
        assert "zero_" not in calls.names  # there is no padding
        assert torch.equal(parameters["a"].data, whole[:32].view(4, 8)) and torch.equal(parameters["b"], whole[32:64])
        assert unit.gradients.partial is not None
        unit.gradients.views["b"].view.fill_(3.0)
        assert torch.equal(unit.gradients.partial[32:64], torch.full((32,), 3.0))
        unit.parameters.release()
        assert not len(parameters["a"])
        whole = resources.wholes.take(unit.numel)
        unit.gradients.drop()


@pytest.mark.parametrize("stage", [1, 2])
def test_padding_is_cleared_before_gradients_are_reduced(stage: int) -> None:
    """Also of memory that is there from the beginning: a quantised block that was not finite may have been in it."""
    layout = lay_out("unit", [Entry("a", (5,), Group(decay=0.1), True), Entry("b", (3,), Group(decay=0.0), True)])
    resources = resources_of(Precision(), CPU, Ledger())
    unit = Unit(layout, UnitAxes(Axis("shard", 2), Axis("tensor"), STAGES[stage]), resources)
    resources.partials.give(torch.full((unit.numel,), torch.nan))
    unit.gradients.open()
    assert unit.gradients.partial is not None
    unit.gradients.partial.fill_(torch.nan)
    for view in unit.gradients.views.values():
        view.fresh = False
    unit.gradients.close()
    used = torch.zeros(unit.numel, dtype=torch.bool)
    used[:5], used[16:19] = True, True
    assert unit.gradients.partial[used].isnan().all() and not unit.gradients.partial[~used].any()


def test_replicas_have_an_axis_of_their_own_name() -> None:
    """The ledger and profiles name messages by it."""
    axes = UnitAxes(Axis("shard"), Axis("tensor"))
    assert [axes.shard.name, axes.tensor.name, axes.replica.name] == ["shard", "tensor", "replica"]
