"""Changes of parameters that go past `gathered`, or come between a forward and its backward, are refused."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megazero
from megazero.base.errors import UserError
from megazero.library import calls
from megazero.library.sharded import Sharded
from tests.library.odd_modules import WIDTH, made, numbers, of_numbers
from tests.library.running import STAGES, on_ranks, sharded_case

Change = Callable[[nn.Parameter], Any]
AROUND: dict[str, Change] = {
    "a row": lambda p: p[0].zero_(),
    "a view": lambda p: p.view(-1).mul_(2),
    "a chunk": lambda p: p.chunk(2)[0].zero_(),
    "nn.init of a slice": lambda p: nn.init.zeros_(p[:2]),
    "a function in place": lambda p: functional.relu(p, inplace=True),
    "data": lambda p: p.data.clamp_(-0.01, 0.01),
    "detach": lambda p: p.detach().zero_(),
}
NEXT: dict[str, Callable[[Sharded], Any]] = {
    "forward": lambda sharded: sharded(numbers(0, 0)),
    "backward": lambda sharded: sharded.backward(of_numbers(sharded, 0, 0)),
    "gathered": lambda sharded: sharded.gathered().__enter__(),
    "full_state_dict": lambda sharded: sharded.full_state_dict(),
}


def weight_of(sharded: Sharded) -> nn.Parameter:
    return sharded.module.get_parameter("first.weight")


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, None), (1, "bf16"), pytest.param(2, None, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("change", AROUND)
def test_a_change_through_a_view_is_refused_by_the_next_call(change: str, stage: int, precision: str | None):
    for call in NEXT.values():
        sharded = sharded_case("plain", stage, precision=precision)
        with torch.no_grad():
            AROUND[change](weight_of(sharded))
        with pytest.raises(UserError, match=r"MZ-502.*first\.weight was changed in place"):
            call(sharded)


def test_a_change_between_backward_and_step_is_refused():
    sharded = sharded_case("plain", 1)
    sharded.backward(of_numbers(sharded, 0, 0))
    with torch.no_grad():
        weight_of(sharded)[0].zero_()
    with pytest.raises(UserError, match="MZ-502"):
        sharded.step()


@pytest.mark.parametrize("stage", STAGES)
def test_only_what_was_asked_for_can_be_changed(stage: int):
    """Another parameter, of this unit or of another one, would have it until the next update."""
    sharded = sharded_case("plain", stage)
    for name in ("first.bias", "blocks.0.linear.weight"):
        with pytest.raises(UserError, match=r"MZ-50[26]"), sharded.gathered("first.weight"):
            sharded.module.get_parameter(name).zero_()
    with pytest.raises(UserError, match=r"MZ-502.*first\.bias"), sharded.gathered("first.weight") as values:
        values["first.weight"].zero_()
        sharded.module.get_parameter("first.bias").data[0] = 1.0


def differing(stage: int) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    sharded = sharded_case("plain", stage)
    with pytest.raises(UserError, match="MZ-502") as caught, sharded.gathered() as values:
        values["first.weight"].fill_(sharded.rank + 1)
        if sharded.rank:
            values["blocks.1.norm.bias"].fill_(7.0)
    held = sharded.full_state_dict(everywhere=True)
    sharded.backward(of_numbers(sharded, 0, 0))
    sharded.step()
    with sharded.gathered() as values:
        return str(caught.value), held, {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_after_different_changes_all_ranks_have_those_of_rank_0(stage: int):
    (said, held, first), (_, theirs, second) = on_ranks(2, differing, stage)
    assert "rank 1 has changed it to other values than rank 0, whose values all ranks have now" in said
    assert torch.equal(held["first.weight"], torch.ones(WIDTH, WIDTH, dtype=torch.float64))
    assert not (held["blocks.1.norm.bias"] == 7.0).any()
    for mine, other in ((held, theirs), (first, second)):
        assert all(torch.equal(value, other[name]) for name, value in mine.items())


def between(stage: int) -> list[str]:
    """Change values between a forward and its backward; return what is said."""
    said = []

    def gathered(sharded: Sharded) -> None:
        with sharded.gathered() as values:
            values["first.weight"].mul_(2)

    for change in (gathered, lambda sharded: sharded.load_state_dict(made("plain").state_dict())):
        sharded = sharded_case("plain", stage)
        loss = of_numbers(sharded, 0, sharded.rank)
        change(sharded)
        with pytest.raises((UserError, RuntimeError)) as caught:
            sharded.backward(loss)
        said.append(str(caught.value))
        sharded.backward(of_numbers(sharded, 0, sharded.rank))
        sharded.step()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_of_other_values_has_no_backward(stage: int):
    for said in on_ranks(2, between, stage):
        assert all("MZ-506" in line or "modified by an inplace operation" in line for line in said), said


def test_looking_at_values_leaves_a_graph_as_it_is():
    sharded = sharded_case("plain", 3)
    loss = of_numbers(sharded, 0, 0)
    with sharded.gathered() as values:
        assert values["first.weight"].abs().sum() > 0
    sharded.backward(loss)


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("use", ["zero_grad", "step", "clip"])
def test_an_optimizer_that_was_made_before_is_refused(use: str, on_meta: bool):
    module = made("plain").to("meta" if on_meta else "cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    parameters = list(module.parameters())
    initial = (lambda name, tensor: tensor.fill_(0.1)) if on_meta else None
    megazero.shard(module, "adamw", stage=1, initial=initial)
    with pytest.raises(UserError, match=r"MZ-506.*first\.weight\.grad was read"):
        {"zero_grad": optimizer.zero_grad, "step": optimizer.step}.get(
            use, lambda: nn.utils.clip_grad_norm_(parameters, 1.0)
        )()


def test_forwards_without_a_backward_leave_nothing():
    teacher = megazero.shard(made("plain"), None, stage=3, kernels="reference")
    for _ in range(5):
        teacher(numbers(0, 0))
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) is calls._Call]
    assert not any(call.calls.values.parts[0].module is teacher.module for call in left)
