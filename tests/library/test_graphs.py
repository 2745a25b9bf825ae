"""Several sharded modules in one graph, and frozen ones: equal to plain torch in all stages."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megazero
from megazero.base.errors import UserError
from tests.library.odd_modules import WIDTH, Stack, made, numbers, of_numbers
from tests.library.phases import Nets, Phase, Scenario, compare
from tests.library.running import ADAMW, on_ranks, sharded_case


def critic(nets: Nets, step: int, rank: int) -> Tensor:
    """The loss of a discriminator: its generator runs in the graph, and is left out by detach."""
    fake = nets["g"](numbers(step, rank))
    return nets["d"](fake.detach()).square().mean() + (nets["d"](numbers(step, rank + 50)) - 1).square().mean()


def generator(nets: Nets, step: int, rank: int) -> Tensor:
    return (nets["d"](nets["g"](numbers(step, rank))) - 1).square().mean()


def with_penalty(nets: Nets, step: int, rank: int) -> Tensor:
    x = numbers(step, rank).requires_grad_(True)
    (slope,) = torch.autograd.grad(nets["d"](x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + critic(nets, step, rank)


def frozen(modules: Mapping[str, nn.Module], step: int, *, now: bool) -> None:
    modules["d"].requires_grad_(not now)


def twice(step_phase: Phase) -> list[Phase]:
    """A phase in two micro-batches, of which the first has last=False."""
    return [Phase(step_phase.loss, step_phase.trains, step_phase.before, last=False), step_phase]


def pair() -> dict[str, nn.Module]:
    return {"g": Stack(2), "d": Stack(2)}


def checkpointed() -> dict[str, nn.Module]:
    def run(stack: Stack, x: Tensor) -> Tensor:
        for block in stack.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x

    return {"g": Stack(2, run), "d": Stack(2, run)}


def auto(nets: Nets, step: int, rank: int) -> Tensor:
    x = numbers(step, rank)
    x = x if isinstance(nets["g"], megazero.Sharded) else x.to(next(nets["g"].parameters()).dtype)
    return (nets["d"](nets["g"](x)) - x).square().mean()


def three(nets: Nets, step: int, rank: int) -> Tensor:
    """The second is used before and after the third; each rank calls the first and the second in another order."""
    x = numbers(step, rank)
    a, b = (nets["a"](x), nets["b"](x)) if rank == 0 else [nets["b"](x), nets["a"](x)][::-1]
    return nets["b"](nets["c"](a + b)).square().mean()


def distilled(nets: Nets, step: int, rank: int) -> Tensor:
    with torch.no_grad():
        target = nets["t"](numbers(step, rank))
    return (nets["s"](numbers(step, rank)) - target).square().mean()


def perceptual(nets: Nets, step: int, rank: int) -> Tensor:
    return nets["t"](nets["s"](numbers(step, rank))).square().mean() + distilled(nets, step, rank)


def student() -> dict[str, nn.Module]:
    return {"s": Stack(2), "t": Stack(3)}


GAN = [Phase(critic, ("d",), partial(frozen, now=False)), Phase(generator, ("g",), partial(frozen, now=True))]
TOLD = [Phase(critic, ("d",)), Phase(generator, ("g",))]
SCENARIOS = {
    "gan": Scenario(pair, TOLD),
    "gan, frozen": Scenario(pair, GAN),
    "gan, micro-batches": Scenario(pair, [*twice(TOLD[1]), *twice(TOLD[0])]),
    "gan, between micro-batches": Scenario(pair, [twice(TOLD[0])[0], TOLD[1], TOLD[0]]),
    "gan, checkpointed": Scenario(checkpointed, TOLD),
    "encoder and decoder": Scenario(pair, [Phase(auto, ("g", "d"))]),
    "encoder and decoder, micro-batches": Scenario(pair, twice(Phase(auto, ("g", "d")))),
    "encoder and decoder, checkpointed": Scenario(checkpointed, [Phase(auto, ("d", "g"))]),
    "encoder, then decoder": Scenario(pair, [Phase(auto, ("g",)), Phase(auto, ("d", "g")), Phase(auto, ("d",))]),
    "teacher": Scenario(student, [Phase(distilled, ("s",))], frozen=("t",)),
    "perceptual": Scenario(student, [Phase(perceptual, ("s",))], frozen=("t",)),
    "sgd": Scenario(pair, GAN, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5)),
}
PENALTY = Scenario(pair, [Phase(with_penalty, ("d",)), Phase(generator, ("g",))])
THREE = Scenario(lambda: {"a": Stack(2), "b": Stack(2), "c": Stack(2)}, [Phase(three, ("a", "b", "c"))])


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if stage == 3 or (name, stage) == ("gan", 1) else pytest.mark.full)
        for name in SCENARIOS
        for stage in range(4)
    ],
)
def test_modules_in_one_graph(name: str, stage: int):
    compare(SCENARIOS[name], 2, [stage])


@pytest.mark.parametrize(
    "name", ["gan", *(pytest.param(name, marks=pytest.mark.full) for name in ("encoder and decoder", "perceptual"))]
)
def test_modules_in_one_graph_with_hybrid_sharding(name: str):
    compare(SCENARIOS[name], 4, [1, 3], shard_ranks=2)


def test_ranks_may_call_modules_in_another_order():
    """Units of the modules are alike: what is summed, or gathered, in the place of another would show in no shape."""
    compare(THREE, 2, range(3))


def test_a_gradient_penalty():
    compare(PENALTY, 2, range(3))


def penalty_in_shards() -> str:
    nets = {"d": sharded_case("plain", 3), "g": sharded_case("plain", 3)}
    with pytest.raises(UserError) as caught:
        with_penalty(nets, 0, 0)
    return str(caught.value)


def test_a_gradient_penalty_in_stage_3_is_one_line():
    assert all("MZ-505" in line and "stage 0, 1 or 2" in line for line in on_ranks(2, penalty_in_shards, fresh=True))


def other_order() -> str:
    a, b = sharded_case("plain", 3), sharded_case("plain", 3)
    with pytest.raises(UserError) as caught:
        x = numbers(0, 0)
        loss = (a(x) + b(x) if a.rank == 0 else b(x) + a(x)).mean()
        megazero.backward(loss, a, b)
    return str(caught.value)


def test_modules_in_another_order_in_stage_3_are_one_line():
    for line in on_ranks(2, other_order, fresh=True):
        assert "MZ-507 rank=1" in line and "other units" in line, line


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(9, WIDTH, mode="sum"), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.sum(1) * 7).long().abs() % 9
        return self.head(self.table(ids[:, None])) * x


def with_tables() -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        g, d = Ids().double(), Ids().double()
    told = {"stage": 1, "kernels": "reference", "tables": ["table"]}
    g, d = (megazero.shard(one, {"name": "adamw", **ADAMW}, **told) for one in (g, d))
    for step in range(3):
        x = numbers(step, g.rank)
        megazero.backward(d(g(x)).square().mean(), g, d, last=False)
        g.backward(d(g(x)).mean())  # it comes through the table of d
        d.backward(d(x).mean())
        g.step()
        d.step()
    return {**g.full_state_dict(), **{f"d.{name}": value for name, value in d.full_state_dict().items()}}


def test_tables_of_modules_that_are_not_trained_stay():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        g, d = Ids().double(), Ids().double()
    dense = {one: torch.optim.AdamW(one.head.parameters(), **ADAMW) for one in (g, d)}  # type: ignore[arg-type]
    sums = {one: torch.zeros(9, dtype=torch.float64) for one in (g, d)}
    for step in range(3):
        for rank in range(2):
            x = numbers(step, rank)
            for loss, trained in ((d(g(x)).square().mean(), (g, d)), (d(g(x)).mean(), (g,)), (d(x).mean(), (d,))):
                live = [p for one in trained for p in one.parameters()]
                for p, found in zip(live, torch.autograd.grad(loss / 2, live), strict=True):
                    p.grad = found if p.grad is None else p.grad + found
        for one, optimizer in dense.items():
            optimizer.step()
            weight = one.table.weight
            assert weight.grad is not None
            with torch.no_grad():  # row-wise Adagrad
                sums[one] += weight.grad.square().mean(1)
                weight -= 0.01 * weight.grad / (sums[one].sqrt()[:, None] + 1e-10)
            one.zero_grad()
    expected = {**g.state_dict(), **{f"d.{name}": value for name, value in d.state_dict().items()}}
    found, *_ = on_ranks(2, with_tables)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-10), name


def in_fp16(stage: int) -> tuple[list[bool], list[dict[str, Tensor]]]:
    """Return the gradients of an encoder and a decoder whose loss scales have parted, and the same in one module."""
    g, d = (sharded_case("plain", stage, precision="fp16") for _ in range(2))
    d.backward(of_numbers(d, 0, d.rank) * 1e5)
    skipped = [d.step().skipped]
    found = []
    for both in (True, False):
        loss = auto({"g": g, "d": d}, 0, g.rank) / 32
        if both:
            megazero.backward(loss, g, d)
        else:
            g.backward(loss)
            d.backward(auto({"g": g, "d": d}, 0, g.rank) / 32)
        found += [g.gradients(), d.gradients()]
        skipped += [g.step(lr=0.0).skipped, d.step(lr=0.0).skipped]
    return skipped, found


@pytest.mark.parametrize("stage", [0, 3])
def test_each_module_has_its_own_loss_scale(stage: int):
    module = nn.ModuleList([made("plain").half().float(), made("plain").half().float()])
    for rank in range(2):
        (auto({"g": module[0], "d": module[1]}, 0, rank).float() / 64).backward()
    for skipped, (g, d, g_alone, d_alone) in on_ranks(2, in_fp16, stage):
        assert skipped == [True, False, False, False, False]
        for own, found, alone in ((module[0], g, g_alone), (module[1], d, d_alone)):
            for name, parameter in own.named_parameters():
                assert parameter.grad is not None
                scale = float(parameter.grad.abs().max())  # products in fp16, of which the last bit is 2^-11
                assert torch.allclose(found[name], parameter.grad, rtol=0.0, atol=2**-7 * scale), name
                assert torch.allclose(found[name], alone[name], rtol=0.0, atol=2**-7 * scale), name


def without_an_optimizer() -> list[str]:
    teacher = megazero.shard(made("plain"), None, stage=1, kernels="reference")
    lines = []
    for wrong in (
        lambda: teacher.backward(of_numbers(sharded_case("plain", 1), 0, 0)),
        teacher.step,
        lambda: teacher.module.requires_grad_(True) and teacher(numbers(0, 0)),
        lambda: megazero.backward(torch.ones((), requires_grad=True)),
    ):
        with pytest.raises(UserError) as caught:
            wrong()
        lines.append(str(caught.value))
    return lines


def test_a_module_without_an_optimizer_is_not_trained():
    backward, step, unfrozen, nothing = without_an_optimizer()
    assert "MZ-510" in backward and "without an optimizer" in backward and "MZ-510" in step and "MZ-510" in nothing
    assert "MZ-502" in unfrozen and "first.weight requires a gradient, and the module was sharded without" in unfrozen


def kept(stage: int, folder: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    teacher = megazero.shard(made("plain"), None, stage=stage, kernels="reference")
    with teacher.gathered("first.*") as values:
        values["first.weight"].fill_(0.5)
    before = teacher.full_state_dict(everywhere=True)
    teacher.save(folder)
    teacher.load_state_dict({name: value * 2 for name, value in before.items()})
    teacher.load(folder)
    held = {kind: size["now"] for kind, size in teacher.memory().items()}
    return before, teacher.full_state_dict(everywhere=True), held


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_module_is_looked_at_saved_and_loaded(stage: int, tmp_path: Any):
    for before, after, held in on_ranks(2, kept, stage, tmp_path):
        assert before["first.weight"].eq(0.5).all() and all(torch.equal(after[n], x) for n, x in before.items())
        assert "gradients" not in {kind for kind, size in held.items() if size}


def of_torch() -> Tensor:
    """A plain module before a frozen one that is sharded: torch's own backward."""
    teacher, module = megazero.shard(made("plain"), None, stage=3, kernels="reference"), made("tied")
    teacher(module(numbers(0, 0))).square().mean().backward()
    found = module.get_parameter("first.weight").grad
    assert found is not None
    return found


def test_gradients_go_through_a_frozen_module_to_a_plain_one():
    teacher, module = made("plain").requires_grad_(False), made("tied")
    teacher(module(numbers(0, 0))).square().mean().backward()
    for found in on_ranks(2, of_torch):
        assert torch.allclose(found, module.get_parameter("first.weight").grad, rtol=1e-12, atol=1e-13)  # type: ignore[arg-type]
