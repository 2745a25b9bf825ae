"""`requires_grad_` after `megazero.shard`: what is frozen keeps its values and state; equal to plain torch."""

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero import Sharded
from megazero.base.errors import UserError
from tests.library.odd_modules import Block, Stack, made, numbers, of_numbers
from tests.library.phases import Nets, Phase, Scenario, compare, plain_state
from tests.library.running import ADAMW, STAGES, on_ranks, sharded_case

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1)
OPTIMIZERS = {
    "ours": None,
    "sgd": SGD,
    "adam": partial(torch.optim.Adam, lr=0.01, eps=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.5),
}


def loss(nets: Nets, step: int, rank: int) -> Tensor:
    return of_numbers(nets["m"], step, rank)


def gradually(modules: Mapping[str, nn.Module], step: int) -> None:
    """Unfreeze another block with each step, the last one first."""
    modules["m"].get_submodule("blocks").requires_grad_(False)
    for block in list(modules["m"].get_submodule("blocks"))[3 - step :]:  # type: ignore[arg-type]
        block.requires_grad_(True)


def partly(modules: Mapping[str, nn.Module], step: int) -> None:
    """Freeze other parameters in each step but the first, also some of a unit."""
    for number, parameter in enumerate(modules["m"].parameters()):
        parameter.requires_grad_(step == 0 or (number + step) % 3 > 0)


def wholly(modules: Mapping[str, nn.Module], step: int) -> None:
    modules["m"].get_submodule("blocks.1").requires_grad_(step % 2 == 0)
    modules["m"].get_submodule("first").requires_grad_(step != 1)


def head_first(modules: Mapping[str, nn.Module], step: int) -> None:
    """Unfreeze some of what is frozen from the beginning, and freeze it again."""
    modules["m"].get_parameter("first.bias").requires_grad_(step in (1, 3))
    modules["m"].get_submodule("blocks.1.linear").requires_grad_(step > 1)
    modules["m"].get_parameter("blocks.2.norm.weight").requires_grad_(step > 0)


def frozen_stack() -> dict[str, nn.Module]:
    return {"m": made("frozen")}


def half_frozen() -> dict[str, nn.Module]:
    module = Stack()
    module.blocks.requires_grad_(False)
    return {"m": module}


SCENARIOS = {
    "gradually": (half_frozen, gradually),
    "from the beginning": (frozen_stack, head_first),
    "partly": (lambda: {"m": Stack()}, partly),
    "wholly": (lambda: {"m": Stack()}, wholly),
}


def scenario(name: str, optimizer: str, *, micro: bool = False) -> Scenario:
    make, before = SCENARIOS[name]
    first = [Phase(loss, ("m",), lambda modules, step: before(modules, step + 1), last=False)] if micro else []
    return Scenario(make, [*first, Phase(loss, ("m",), before)], optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("optimizer", ["ours", pytest.param("sgd", marks=pytest.mark.full)])
def test_what_is_frozen_after_sharding_stays(name: str, optimizer: str, stage: int):
    compare(scenario(name, optimizer), 2, [stage])


@pytest.mark.parametrize(
    "optimizer", ["adagrad", *(pytest.param(o, marks=pytest.mark.full) for o in ("adam", "rmsprop"))]
)
def test_optimizers_of_torch_leave_frozen_parameters_alone(optimizer: str):
    for name in SCENARIOS:
        compare(scenario(name, optimizer), 2, [1])


def test_what_is_frozen_in_one_of_two_micro_batches_moves():
    compare(scenario("partly", "ours", micro=True), 2, [1, 2])
    compare(scenario("wholly", "sgd", micro=True), 2, [0, 3])


@pytest.mark.full
def test_frozen_parameters_in_other_units_and_on_other_ranks():
    for name in SCENARIOS:
        compare(scenario(name, "ours"), 2, [1, 3], units=())
        compare(scenario(name, "ours"), 4, [2], shard_ranks=2)
        compare(scenario(name, "ours"), 2, [2, 3], units=[Block, nn.Linear])


def steps(sharded: Sharded, name: str, some: range) -> None:
    for step in some:
        SCENARIOS[name][1]({"m": sharded.module}, step)
        sharded.backward(of_numbers(sharded, step, sharded.rank % 2))
        sharded.step()


def of(name: str, stage: int, optimizer: str) -> Sharded:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = SCENARIOS[name][0]()["m"].double()
    asked = OPTIMIZERS[optimizer] or {"name": "adamw", **ADAMW}
    return megazero.shard(module, asked, stage=stage, kernels="reference", clip=0.5)


def saved(name: str, stage: int, optimizer: str, folder: Path) -> None:
    sharded = of(name, stage, optimizer)
    steps(sharded, name, range(2))
    sharded.save(folder)
    steps(sharded, name, range(2, 3))


def loaded(name: str, stage: int, optimizer: str, folder: Path) -> dict[str, Tensor]:
    sharded = of(name, stage, optimizer)
    for step in range(2):
        SCENARIOS[name][1]({"m": sharded.module}, step)
        if step == 0:  # counts of an own history are forgotten
            steps(sharded, name, range(1))
    sharded.load(folder)
    steps(sharded, name, range(2, 4))
    return sharded.full_state_dict(everywhere=True)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("ours", marks=pytest.mark.full)])
def test_checkpoints_have_the_count_of_each_parameter(name: str, optimizer: str, tmp_path: Path):
    expected = plain_state(scenario(name, optimizer), 2)
    for before, after in ((3, 1), (0, 3)):
        folder = tmp_path / str(before)
        on_ranks(2, saved, name, before, optimizer, folder)
        found, *_ = on_ranks(4, loaded, name, after, optimizer, folder)
        for key, value in expected.items():
            assert torch.allclose(found[key.removeprefix("m.")], value, rtol=1e-12, atol=1e-13), key


def other_parameters(folder: Path) -> str:
    sharded = of("gradually", 3, "ours")
    steps(sharded, "gradually", range(1))
    sharded.module.get_submodule("blocks.2").requires_grad_(True)
    sharded.save(folder)
    with pytest.raises(UserError) as caught:
        of("gradually", 1, "ours").load(folder)
    return str(caught.value)


def test_a_checkpoint_fits_a_module_whose_parameters_have_been_trained_alike(tmp_path: Path):
    line, other = on_ranks(2, other_parameters, tmp_path, fresh=True)
    assert "MZ-508" in other
    assert "MZ-508" in line and "blocks.2.linear.bias: expected F64 [6], frozen or a buffer, got F64 [6]" in line


def held(stage: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    sharded, sizes = of("gradually", stage, "ours"), []
    for step in (0, 1, 3):
        steps(sharded, "gradually", range(step, step + 1))
        sizes.append({kind: size["now"] for kind, size in sharded.memory().items()})
    return sizes[0], sizes[1], sizes[2]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 2])
def test_memory_comes_with_what_is_unfrozen(stage: int):
    """In fp64, two ranks: a block of 96 elements, the first layer of 64."""
    for few, more, all_ in on_ranks(2, held, stage):
        for sizes, blocks in ((few, 0), (more, 1), (all_, 3)):
            numel = 64 + 96 * blocks
            assert sizes["parameters"] == 8 * (64 + 96 * 3)
            assert sizes["gradients"] == 8 * numel // (2 if stage else 1)
            assert sizes["optimizer"] == 8 * 2 * numel // (2 if stage else 1)


def parameters_stay() -> None:
    sharded, out = of("gradually", 3, "ours"), io.StringIO()
    sharded.watch(1, out)
    mine = sharded.module.get_parameter("blocks.2.linear.weight")
    steps(sharded, "gradually", range(3))
    assert sharded.module.get_parameter("blocks.2.linear.weight") is mine
    if sharded.rank == 0:
        assert "blocks.2 (frozen)" in out.getvalue() and "blocks.2 (unfrozen)" in out.getvalue().split("step 2")[1]
    with pytest.raises(UserError, match=r"MZ-506.*loss.backward"):
        of_numbers(sharded, 0, 0).backward()


def test_parameters_are_those_that_the_user_holds():
    on_ranks(2, parameters_stay)


def backward_of_before() -> None:
    sharded = of("gradually", 3, "ours")
    loss = of_numbers(sharded, 0, 0)
    sharded.module.requires_grad_(True)
    sharded(numbers(0, 0))
    with pytest.raises(UserError, match=r"MZ-506.*a forward that ran before"):
        sharded.backward(loss)


def test_a_graph_of_before_has_no_backward():
    on_ranks(2, backward_of_before)


def in_fp16(stage: int) -> tuple[bool, dict[str, Tensor]]:
    sharded = megazero.shard(half_frozen()["m"].float(), SGD, stage=stage, kernels="reference", precision="fp16")
    skipped = []
    for step in range(3):
        gradually({"m": sharded.module}, step)
        # A loss so small that no random weights make its scaled gradients overflow.
        sharded.backward(of_numbers(sharded, step, sharded.rank) * (1e9 if step == 0 else 1e-3))
        skipped.append(sharded.step().skipped)
    scale = sharded._assembly.engine.loss_scale
    return skipped[0] and not any(skipped[1:]) and int(scale.good) == 2, sharded.full_state_dict(everywhere=True)


def test_what_is_unfrozen_has_the_loss_scale_and_the_count_of_updates():
    for kept, found in on_ranks(2, in_fp16, 3):
        assert kept and all(torch.isfinite(values).all() for values in found.values())


def on_one_rank(name: str) -> str:
    sharded = of("partly", 1, "ours")
    if sharded.rank == 1:
        sharded.module.get_parameter(name).requires_grad_(False)
    with pytest.raises(UserError) as caught:
        sharded.backward(of_numbers(sharded, 0, 0))
    return str(caught.value)


def test_ranks_that_freeze_other_parameters_say_so():
    for line in on_ranks(2, on_one_rank, "blocks.1.norm.weight", fresh=True):
        assert "MZ-502 rank=1" in line and "frozen other parameters than rank 0" in line


def test_what_was_frozen_is_unfrozen_between_steps():
    sharded = of("gradually", 1, "ours")
    blocks, loss = sharded.module.get_submodule("blocks"), of_numbers(sharded, 0, 0)
    for call in (lambda: sharded.backward(loss), lambda: sharded(numbers(0, 0)), sharded.step):
        blocks.requires_grad_(True)
        with pytest.raises(UserError, match=r"MZ-502.*blocks.0.norm.weight was unfrozen between"):
            call()
        blocks.requires_grad_(False)
        call()
    assert sharded.steps == 1


def test_parameters_without_real_values_stay_frozen():
    module = Stack()
    module.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
    sharded = megazero.shard(module, "adamw", stage=1)
    module.requires_grad_(True)
    with pytest.raises(UserError, match=r"MZ-502.*phase requires a gradient, but only floating-point parameters"):
        sharded(numbers(0, 0).float())


def test_a_frozen_parameter_has_no_part_in_the_norm():
    module, sharded = made("plain"), sharded_case("plain", 0)
    for one in (module, sharded.module):
        one.get_parameter("first.weight").requires_grad_(False)
    of_numbers(module, 0, 0).backward()
    sharded.backward(of_numbers(sharded, 0, 0))
    assert sharded.step().grad_norm == pytest.approx(float(nn.utils.clip_grad_norm_(module.parameters(), 1.0)))


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Embedding(7, 3), nn.Embedding(9, 3), nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.a(ids % 7) * self.b(ids) + self.b(ids % 5)).square().mean()


def ids_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


def two_tables() -> TwoTables:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TwoTables().double()


def with_tables(fetches: bool) -> dict[str, Tensor]:
    module = two_tables()
    module.head.bias.requires_grad_(False)
    sharded = megazero.shard(module, SGD, stage=1, kernels="reference", tables=["a", "b"])
    for step in range(4):
        module.a.requires_grad_(step % 2 == 0)
        module.b.requires_grad_(step != 2)
        module.head.bias.requires_grad_(step > 0)
        ids = ids_of(step, sharded.rank)
        if fetches:
            sharded.prefetch_rows({"a": ids % 7, "b": ids})
            loss = module.head(module.a(ids % 7) * module.b(ids) + module.b(ids % 5)).square().mean()
        else:
            loss = sharded(ids)
        sharded.backward(loss)
        sharded.step()
    return sharded.full_state_dict(everywhere=True)


def test_tables_follow_too():
    module = two_tables()
    optimizer = SGD(module.head.parameters())
    sums = {table: torch.zeros(len(table.weight), dtype=torch.float64) for table in (module.a, module.b)}
    for step in range(4):
        module.a.requires_grad_(step % 2 == 0)
        module.b.requires_grad_(step != 2)
        module.head.bias.requires_grad_(step > 0)
        for rank in range(2):
            (module(ids_of(step, rank)) / 2).backward()
        optimizer.step()
        for table, squares in sums.items():
            if table.weight.grad is not None:
                with torch.no_grad():  # row-wise Adagrad
                    squares += table.weight.grad.square().mean(1)
                    table.weight -= 0.01 * table.weight.grad / (squares.sqrt()[:, None] + 1e-10)
        module.zero_grad()
    for fetches in (True, False):
        for found in on_ranks(2, with_tables, fetches):
            for name, value in module.state_dict().items():
                assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-10), (fetches, name)


def wrong_tables() -> tuple[str, str]:
    told = {"stage": 1, "kernels": "reference", "tables": ["a"]}
    lines = []
    for frozen in (True, False):
        module = two_tables()
        module.a.requires_grad_(not frozen)
        sharded = megazero.shard(module, SGD, **told)
        module.a.requires_grad_(True)
        with pytest.raises(UserError) as caught:
            sharded.backward(sharded(ids_of(0, 0)) + module.a.weight.sum())
        lines.append(str(caught.value))
    return lines[0], lines[1]


def test_what_tables_cannot_follow_is_one_line():
    for frozen, used in on_ranks(2, wrong_tables):
        assert "MZ-502" in frozen and "a.weight requires a gradient, but was frozen" in frozen
        assert "MZ-506" in used and "a.weight was used outside of the forward" in used
