"""Operations as functions of autograd: how many a block has, what they keep, and where gradients go."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megazero.comm.grid import Axis
from megazero.comm.regions import Region
from megazero.kernels.operations import REFERENCE
from megazero.model.block import _Join
from megazero.model.dropout import Dropout
from megazero.model.linear import ColumnProducts, RowProducts
from megazero.model.norm import Norm
from megazero.model.tape import Operation, Tape, apply
from tests.model.small import GPT, LLAMA, make, step_of

REGION = Region(Axis("tensor"), False, "block")


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def nodes_behind(root: Tensor) -> set:
    """The nodes of autograd behind a tensor."""
    todo, seen = [root.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return seen


def functions_of_python(root: Tensor) -> int:
    """The nodes whose backward is written in Python."""
    return sum(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes_behind(root))


@pytest.mark.parametrize(("shape", "expected"), [(GPT, 2), (LLAMA, 4), (replace(GPT, dropout=0.5), 2)])
def test_a_block_has_two_functions_of_python(shape, expected: int) -> None:
    """And two more that rotate queries and keys."""
    x = torch.randn(shape.seq_len, 2, shape.hidden, requires_grad=True)
    assert functions_of_python(make(shape, torch.float32).blocks[0](x, step_of(2))) == expected


@pytest.mark.parametrize("shape", [GPT, LLAMA, replace(GPT, dropout=0.5)])
def test_a_block_s_input_has_one_gradient(shape) -> None:
    """The norm's backward adds what comes by the residual stream: autograd has nothing to add in a pass of its own."""
    x = torch.randn(shape.seq_len, 2, shape.hidden, requires_grad=True)
    nodes = nodes_behind(make(shape, torch.float32).blocks[0](x, step_of(2)))
    uses = [before for node in nodes for before, _ in node.next_functions if before is not None]
    assert sum(getattr(node, "variable", None) is x for node in uses) == 1


@pytest.mark.parametrize("kind", ["column", "row", "layernorm", "rmsnorm"])
def test_without_an_engine_gradients_are_autograd_s(kind: str) -> None:
    """Of two uses of the same parameters, by finite differences of the first and by autograd."""
    x, weight, bias = doubles(5, 4).requires_grad_(), nn.Parameter(doubles(4, 4)), nn.Parameter(doubles(4))
    owner: dict[str, nn.Parameter] = {"weight": weight, "bias": bias}
    operation: Operation = ColumnProducts(REGION, owner) if kind == "column" else RowProducts(REGION, owner)
    if kind.endswith("norm"):
        operation = norm = Norm(replace(GPT, norm=kind), 4, REFERENCE)
        norm.weight = nn.Parameter(doubles(4))
        owner = dict(norm.named_parameters())
        if "bias" in owner:
            norm.bias = owner["bias"] = bias

    def once(x: Tensor) -> Tensor:
        y = apply(operation, x)
        return y[0] if kind == "column" else y

    weights = doubles(5, 4)
    (once(once(x)) * weights).sum().backward()
    for tensor in (x, *dict(owner).values()):
        found = tensor.grad
        assert found is not None
        direction = doubles(*tensor.shape)
        with torch.no_grad():
            ends = []
            for step in (1e-6, -1e-6):
                tensor += step * direction
                ends.append((once(once(x)) * weights).sum())
                tensor -= step * direction
        slope = (ends[0] - ends[1]) / 2e-6
        assert abs(slope - (found * direction).sum()) <= 1e-5 * max(1.0, abs(slope))


class Kept:
    """An operation that keeps a tensor of its own, and looks whether the one before it is still there."""

    def __init__(self, before: "Kept | None" = None):
        self.owners = ({"weight": nn.Parameter(torch.ones(1))},)
        self.before, self.gone = before, False
        self.own: weakref.ref[Tensor] | None = None

    def run(self, tape: Tape, x: Tensor) -> Tensor:
        if self.before is not None:
            x = self.before.run(tape, x)
        own = x + 1.0
        self.own = weakref.ref(own)
        tape.keep((own,))
        return x * 2.0

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        grad = self._back(tape, grad)
        if self.before is not None:
            self.gone = self.own is not None and self.own() is None
            grad = self.before.back(tape, grad)
        return grad

    def _back(self, tape: Tape, grad: Tensor) -> Tensor:
        (own,) = tape.take()
        return grad * 2.0 + 0.0 * own


def test_what_is_kept_is_freed_operation_by_operation() -> None:
    first = Kept()
    second = Kept(first)
    x = torch.ones(3, requires_grad=True)
    y = apply(second, x)
    assert first.own is not None and first.own() is not None and second.own is not None and second.own() is not None
    y.sum().backward()
    assert second.gone and first.own() is None and torch.equal(x.grad, torch.full((3,), 4.0))


def test_nothing_is_kept_where_no_backward_comes() -> None:
    class Counted:
        used = 0

        def expect(self) -> None:
            self.used += 1

    slot, operation = Counted(), Kept()
    parameter = operation.owners[0]["weight"]
    parameter.gradient_slot = slot  # type: ignore[attr-defined]
    with torch.no_grad():
        assert apply(operation, torch.ones(3)).grad_fn is None
    assert operation.own is not None and operation.own() is None
    for training, uses in ((False, 0), (True, 1)):
        assert Tape(operation, training).use(parameter) is slot and slot.used == uses


def test_a_sum_without_dropout_and_scale_is_joined_with_the_next_norm() -> None:
    """Also in validation, where dropout does not act."""
    step, dropout = step_of(2), Dropout(0.1, seed=0, layer=0, site=0, ops=REFERENCE)
    join = _Join(dropout, 1.0)
    assert not join.is_plain(step) and join.is_plain(replace(step, training=False))
    assert not _Join(dropout, 2.0).is_plain(replace(step, training=False))
