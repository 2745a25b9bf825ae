"""The interface of a sharded module, and one clear line for each wrong use of it."""

import logging
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.base.errors import UserError
from megazero.library.meeting import launch
from tests.library.odd_modules import Block, Stack, made, numbers, of_numbers
from tests.library.running import ADAMW, LR, on_ranks, plain, sharded_case, train, trained

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def accumulated(stage: int, told: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    sharded = sharded_case("plain", stage)
    for step in range(2):
        for micro in range(3):
            loss = of_numbers(sharded, 10 * step + micro, sharded.rank) / 3
            sharded.backward(loss, last=micro == 2 or not told)
        sharded.step(LR)
    return sharded.full_state_dict(), sharded.traffic()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_add_up_whether_told_or_not(stage: int):
    module = made("plain")
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    for step in range(2):
        for micro in range(3):
            for rank in range(2):
                (of_numbers(module, 10 * step + micro, rank) / 6).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = []
    for told in (True, False):
        (found, traffic), *_ = on_ranks(2, accumulated, stage, told)
        for name, values in module.state_dict().items():
            assert torch.allclose(found[name], values, rtol=1e-12, atol=1e-13), name
        sent.append(traffic["data"]["gradients"]["elements"])
    assert sent[1] == (3 if stage < 2 else 1) * sent[0]


def with_optimizer(make: Callable[..., torch.optim.Optimizer], groups: Any) -> dict[str, Tensor]:
    sharded = sharded_case("frozen", 3, optimizer=make, groups=groups)
    for step in range(3):
        sharded.backward(of_numbers(sharded, step, sharded.rank))
        sharded.step()
    return sharded.full_state_dict()


@pytest.mark.parametrize(
    "make",
    [
        SGD,
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, nesterov=False),
        partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
        partial(torch.optim.AdamW, lr=0.05, eps=1e-3),
        partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
        partial(torch.optim.Adamax, lr=0.01, eps=1e-3),
    ],
)
@pytest.mark.parametrize("groups", [(), (("*norm*", {"weight_decay": 0.5, "lr": 0.01}),)])
def test_optimizers_of_torch(make: Callable[..., torch.optim.Optimizer], groups: Any):
    module = made("frozen")
    own = [p for n, p in module.named_parameters() if p.requires_grad and "norm" not in n]
    norms = [p for n, p in module.named_parameters() if p.requires_grad and "norm" in n]
    optimizer = make([{"params": own}, {"params": norms, **(groups[0][1] if groups else {})}])
    for step in range(3):
        for rank in range(2):
            (of_numbers(module, step, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, *_ = on_ranks(2, with_optimizer, make, groups)
    for name, values in module.state_dict().items():
        assert torch.allclose(found[name], values, rtol=1e-12, atol=1e-13), name


GROUPS = [
    ("*norm*", {"weight_decay": 0.0}),
    ("first.*", {"lr": 4 * LR}),
    ("*.bias", {"lr": LR / 8, "weight_decay": 0.0}),
]


def with_groups(stage: int) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage, groups=GROUPS)
    for step in range(3):
        sharded.backward(of_numbers(sharded, step, sharded.rank))
        sharded.step()
    return sharded.full_state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_groups_of_adamw_have_their_rate_and_decay(stage: int):
    """The first pattern that fits counts: the norms' biases have the rate of all, those of the first layer its own."""
    module = made("plain")
    by_name = [
        {"params": [p], **ADAMW, **next((own for pattern, own in GROUPS if fnmatchcase(name, pattern)), {})}
        for name, p in module.named_parameters()
    ]
    rates = {(group["lr"], group["weight_decay"]) for group in by_name}
    assert rates == {(LR, 0.1), (LR, 0.0), (4 * LR, 0.1), (LR / 8, 0.0)}
    optimizer = torch.optim.AdamW(by_name)
    for step in range(3):
        for rank in range(2):
            (of_numbers(module, step, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, *_ = on_ranks(2, with_groups, stage)
    for name, values in module.state_dict().items():
        assert torch.allclose(found[name], values, rtol=1e-12, atol=1e-13), name


def looked_at(stage: int) -> tuple[Tensor, Tensor, float, Tensor]:
    sharded = sharded_case("plain", stage)
    sharded.backward(of_numbers(sharded, 0, sharded.rank))
    gradient = sharded.gradients("blocks.1.linear.*")["blocks.1.linear.weight"]
    with sharded.gathered(["first.*", "blocks.0.linear.weight"]) as values:
        before = values["first.weight"].clone()
        values["blocks.0.linear.weight"].zero_()
        assert set(values) == {"first.weight", "first.bias", "blocks.0.linear.weight"}
    norm = sharded.step(lr=0.0).grad_norm
    return gradient, before, norm, sharded.full_state_dict(everywhere=True)["blocks.0.linear.weight"]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_whole_values_and_gradients(stage: int):
    module = made("plain")
    ((of_numbers(module, 0, 0) + of_numbers(module, 0, 1)) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), 1e9))
    for gradient, before, found_norm, changed in on_ranks(2, looked_at, stage):
        expected = module.get_parameter("blocks.1.linear.weight").grad
        assert expected is not None and torch.allclose(gradient, expected, rtol=1e-12, atol=1e-13)
        assert torch.equal(before, module.get_parameter("first.weight")) and found_norm == pytest.approx(norm)
        assert not changed.any()


def held_and_sent(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    sharded = sharded_case("plain", stage)
    train(sharded, "plain", steps=1)
    return sharded.memory(), sharded.traffic()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_traffic_are_the_formulas(stage: int):
    """Psi elements in fp64, two ranks; blocks are gathered for forward and backward, the root once."""
    memory, traffic = on_ranks(2, held_and_sent, stage)[0]
    block, root = 96, 64  # 6 x 6, 6 and a norm's 6 and 6; 6 x 6 and 6: each begins at a multiple of 16; two shards
    psi = 3 * block + root
    cut = [1 if stage < first else 2 for first in (3, 2, 1)]
    for kind, parts, copies in zip(("parameters", "gradients", "optimizer"), cut, (1, 1, 2), strict=True):
        assert memory[kind]["now"] == 8 * copies * psi // parts, kind
    sent = traffic["data"]
    gathered = {0: 0, 1: psi, 2: psi, 3: 2 * 3 * block + root}[stage] // 2
    assert sent.get("parameters", {"elements": 0})["elements"] == gathered
    assert sent["gradients"]["elements"] == (psi if stage == 0 else psi // 2)


class FromMeta(Stack):
    """Its second block keeps a buffer that `reset_parameters` makes."""


def from_meta(stage: int, own: bool) -> tuple[dict[str, Tensor], int]:
    with torch.device("meta"):
        module = Stack()
    fill = lambda name, x: x.fill_(len(name))  # noqa: E731
    with torch.random.fork_rng():
        torch.manual_seed(7 + torch.distributed.get_rank())  # ranks draw other numbers: those of rank 0 count
        sharded = megazero.shard(module, "adamw", stage=stage, kernels="reference", initial=None if own else fill)
    return sharded.full_state_dict(everywhere=True), sharded.memory()["parameters"]["peak"]


@pytest.mark.parametrize("own", [True, False])
def test_modules_on_meta_get_values_part_by_part(own: bool):
    (found, peak), (others, _) = on_ranks(2, from_meta, 3, own)
    assert all(torch.equal(found[name], others[name]) for name in found)
    assert peak == 4 * (3 * 96 + 64) // 2
    if own:
        assert torch.equal(found["blocks.1.norm.weight"], torch.ones(6)) and found["first.weight"].std() > 0.05
    else:
        assert found["first.weight"].eq(len("first.weight")).all()


def wrong_unit() -> None:
    sharded_case("plain", 0, units=["blocks.9"])


def not_elementwise() -> None:
    sharded_case("plain", 0, optimizer=partial(torch.optim.Adafactor, lr=0.1))


def unknown_optimizer() -> None:
    sharded_case("plain", 0, optimizer="adafactor")


def changed_afterwards() -> None:
    sharded = sharded_case("plain", 0)
    sharded.module.register_parameter("more", nn.Parameter(torch.zeros(2)))
    sharded(numbers(0, 0))


def step_without_backward() -> None:
    sharded_case("plain", 0).step()


def different_modules() -> None:
    sharded = sharded_case("plain", 0)
    module = made("plain" if sharded.rank == 0 else "tied")
    megazero.shard(module, "adamw", stage=0, kernels="reference")


def twice_differentiated() -> None:
    sharded = sharded_case("plain", 0)
    sharded(numbers(0, 0)).mean().backward(create_graph=True)


def backward_of_torch() -> None:
    sharded = sharded_case("plain", 3)
    sharded(numbers(0, 0)).mean().backward()


def old_graph() -> None:
    sharded = sharded_case("plain", 3)
    kept = of_numbers(sharded, 0, 0)
    sharded.backward(of_numbers(sharded, 1, 0))
    sharded.step()
    sharded.backward(kept)


def no_loss() -> None:
    sharded = sharded_case("plain", 0)
    sharded.backward(sharded(numbers(0, 0)))


def loss_is_none() -> None:
    sharded_case("plain", 0).backward(None)  # type: ignore[arg-type]  # what a model of transformers gives without labels


def loss_without_a_graph() -> None:
    sharded_case("plain", 0).backward(torch.tensor(1.0))


def without_values() -> None:
    with torch.device("meta"):
        module = nn.ParameterList([nn.Parameter(torch.zeros(3))])
    megazero.shard(module, "adamw", stage=0)


def nothing_to_train() -> None:
    megazero.shard(made("plain").requires_grad_(False), "adamw", stage=0)


def sharded_twice() -> None:
    megazero.shard(sharded_case("plain", 0).module, "adamw", stage=0)


def shared_with_another_module() -> None:
    first, second = made("plain"), made("plain")
    second.get_submodule("first").weight = first.get_submodule("first").weight
    megazero.shard(first, "adamw", stage=0, kernels="reference")
    megazero.shard(second, "adamw", stage=0, kernels="reference")


def other_order() -> None:
    sharded = sharded_case("plain", 3)
    stack = sharded.module
    assert isinstance(stack, Stack)
    x, order = numbers(0, 0), list(stack.blocks)[:: 1 if sharded.rank == 0 else -1]
    stack.run = lambda _, y: [y := block(y) for block in order][-1]
    sharded.backward(sharded(x).mean())
    sharded.step()


def fewer_units(blocks: int) -> str:
    """Return the line of ranks of which the second runs some blocks only."""
    sharded = sharded_case("plain", 3)
    stack = sharded.module
    assert isinstance(stack, Stack)
    order = list(stack.blocks)[: None if sharded.rank == 0 else blocks]
    stack.run = lambda _, y: [y, *(y := block(y) for block in order)][-1]
    return line_of(lambda: sharded.backward(of_numbers(sharded, 0, sharded.rank)))


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_units_that_one_rank_leaves_out_are_told_at_once_on_both(blocks: int):
    for line in on_ranks(2, fewer_units, blocks, fresh=True):
        assert re.search("MZ-507 rank=1.*other units of the module than rank 0", line), line


def changed_differently() -> None:
    sharded = sharded_case("plain", 3)
    with sharded.gathered("first.bias") as values:
        values["first.bias"].fill_(sharded.rank)


def penalty_on_what_is_not_there() -> None:
    sharded = sharded_case("plain", 3)
    penalty = sum(parameter.square().sum() for parameter in sharded.module.parameters())
    sharded.backward(sharded(numbers(0, 0)).mean() + penalty)


WRONG: dict[Callable[[], None], tuple[int, str]] = {
    wrong_unit: (1, "MZ-500 .*'blocks.9' is not a submodule; it has first, blocks"),
    not_elementwise: (1, "MZ-501 .*Adafactor"),
    unknown_optimizer: (1, "MZ-501 .*'adafactor'"),
    changed_afterwards: (1, "MZ-502.*Stack.more was added"),
    step_without_backward: (1, "MZ-503 .*without a backward"),
    different_modules: (2, "MZ-504 rank=1.*has another module"),
    twice_differentiated: (1, "MZ-505.*create_graph"),
    no_loss: (1, "MZ-505 .*expected one number"),
    loss_without_a_graph: (1, "MZ-505 .*expected one number.*got shape \\(\\) without a graph"),
    loss_is_none: (1, "MZ-505 .*expected one number.*got NoneType"),
    backward_of_torch: (1, "MZ-506.*sharded.backward"),
    old_graph: (1, "MZ-506.*before the last step"),
    penalty_on_what_is_not_there: (2, "MZ-506.*outside of the forward"),
    other_order: (2, "MZ-507 rank=1.*other units"),
    changed_differently: (2, "MZ-502 .*first.bias: rank 1"),
    without_values: (1, "MZ-509.*meta device"),
    nothing_to_train: (1, "MZ-510 .*no parameter"),
    sharded_twice: (1, "MZ-510 .*sharded already"),
    shared_with_another_module: (1, "MZ-510 .*first.weight is sharded already"),
}


def line_of(wrong: Callable[[], None]) -> str:
    try:
        wrong()
    except UserError as error:
        return str(error)
    return "nothing was wrong"


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_use_gets_one_clear_line(wrong: Callable[[], None]):
    ranks, expected = WRONG[wrong]
    for line in on_ranks(ranks, line_of, wrong):
        assert "\n" not in line and len(line) <= 300
        assert re.search(expected, line), line


def from_a_notebook(stage: int) -> dict[str, Any]:
    state, norms = trained("plain", stage)
    return {"norms": norms, "weight": state.get("first.weight")}


def test_launch_returns_what_rank_0_returned():
    found = launch(from_a_notebook, 2, 3)
    expected, norms = plain("plain", 2)
    assert torch.allclose(found["weight"], expected["first.weight"], rtol=1e-12, atol=1e-13)
    assert found["norms"] == pytest.approx(norms, rel=1e-12)


def test_launch_says_which_rank_failed(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=r"MZ-510 .*MZ-503"):
        launch(step_without_backward, 2)


def test_a_part_is_any_submodule_that_is_asked_for():
    for units, expected in (
        (None, ["(root)", "blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.1"], ["(root)", "blocks.1"]),
        ([Block, nn.Linear], ["(root)", "first", *(f"blocks.{n}{of}" for n in range(3) for of in ("", ".linear"))]),
        ((), ["(root)"]),
    ):
        sharded = sharded_case("plain", 3, units=units)
        assert [part.name for part in sharded._assembly.parts if part.units] == [
            name for name in expected if name != "(root)" or "first" not in expected
        ]
        train(sharded, "plain", steps=1)


def test_offload_on_a_cpu_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megazero"):
        megazero.shard(nn.Linear(2, 2), {"name": "adamw", "lr": 0.1}, stage=1, offload="cpu", kernels="reference")
    assert "offload to cpu has no effect: on a CPU, host memory is device memory" in caplog.text
