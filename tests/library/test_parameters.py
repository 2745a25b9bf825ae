"""What users of torch do with a module, done with a sharded one: right, or refused with the call that does it."""

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.base.errors import UserError
from tests.library.odd_modules import made
from tests.library.running import on_ranks, sharded_case, train, trained

RIGHT = "right"
IN_SHARDS = r"MZ-506: first.weight .*while it is sharded; sharded.full_state_dict\(\)"
COPY = r"MZ-506: first.weight: a sharded module cannot be copied or pickled"
CHANGE = r"MZ-502: .* outside of `sharded.gathered`; call sharded.load_state_dict"
CONVERSION = r"MZ-502: a sharded module cannot be moved or converted .*precision="
GRAD = r"MZ-506: first.weight.grad was read, .*sharded.gradients\(\).*shard\(clip=...\).*sharded.step\(\)"
HOOK = r"MZ-506: first.bias.register_hook was called, but it gets no gradient; sharded.gradients"
LOAD = r"MZ-502: load_state_dict of a sharded module was called; call sharded.load_state_dict"


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def saved(module: nn.Module, expected: dict[str, Tensor]) -> bool:
    torch.save(module.state_dict(), file := io.BytesIO())
    file.seek(0)
    return same(torch.load(file), expected)


def total(values: Iterable[Tensor]) -> float:
    return sum(float(one.sum()) for one in values)


def updated(module: nn.Module) -> None:
    torch.optim.AdamW(module.parameters(), lr=0.1).step()


def overwritten(module: nn.Module) -> None:
    nn.utils.vector_to_parameters(torch.zeros(204), module.parameters())


def reset(module: nn.Module) -> None:
    module.apply(lambda one: one.reset_parameters() if isinstance(one, nn.Linear) else None)


Use = Callable[[nn.Module, dict[str, Tensor]], Any]
# What is done, with the module and its whole values after a step: what is right is True. In stages 0 to 2 and in 3.
USES: dict[str, tuple[Use, str, str]] = {
    "state_dict": (lambda m, e: same(m.state_dict(), e), RIGHT, IN_SHARDS),
    "torch.save of it": (saved, RIGHT, IN_SHARDS),
    "state_dict of a part": (lambda m, e: len(m.get_submodule("first").state_dict()) == 2, RIGHT, IN_SHARDS),
    "torch.save of the module": (lambda m, e: torch.save(m, io.BytesIO()), COPY, COPY),
    "pickle": (lambda m, e: pickle.dumps(m), COPY, COPY),
    "deepcopy": (lambda m, e: copy.deepcopy(m), COPY, COPY),
    "AveragedModel": (lambda m, e: torch.optim.swa_utils.AveragedModel(m), COPY, COPY),
    "a sum": (lambda m, e: total(m.parameters()) == total(e.values()), RIGHT, IN_SHARDS),
    "a norm": (lambda m, e: bool(nn.utils.get_total_norm(m.parameters()) > 0), RIGHT, IN_SHARDS),
    "parameters_to_vector": (lambda m, e: len(nn.utils.parameters_to_vector(m.parameters())) == 204, RIGHT, IN_SHARDS),
    "vector_to_parameters": (lambda m, e: overwritten(m), CHANGE, IN_SHARDS),
    "a count": (lambda m, e: sum(p.numel() for p in m.parameters()) == 204, RIGHT, RIGHT),
    "shapes": (lambda m, e: all(p.shape == e[n].shape for n, p in m.named_parameters()), RIGHT, RIGHT),
    "dtypes": (lambda m, e: {p.dtype for p in m.parameters()} == {torch.float64}, RIGHT, RIGHT),
    "print": (lambda m, e: "Linear(in_features=6" in repr(m) and "first" in f"{m}{next(m.parameters())}", RIGHT, RIGHT),
    "half": (lambda m, e: m.half(), CONVERSION, CONVERSION),
    "to": (lambda m, e: m.to("cpu", torch.bfloat16), CONVERSION, CONVERSION),
    "cuda of a part": (lambda m, e: m.get_submodule("blocks.0").cuda(), CONVERSION, CONVERSION),
    "to_empty": (lambda m, e: m.to_empty(device="cpu"), CONVERSION, CONVERSION),
    "load_state_dict": (lambda m, e: m.load_state_dict(e), LOAD, LOAD),
    "load_state_dict of a part": (lambda m, e: m.get_submodule("first").load_state_dict(e), LOAD, LOAD),
    "apply": (lambda m, e: reset(m), CHANGE, CHANGE),
    "init": (lambda m, e: nn.init.zeros_(m.get_parameter("first.weight")), CHANGE, CHANGE),
    "in place": (lambda m, e: [p.mul_(0.5) for p in m.parameters()], CHANGE, CHANGE),
    "an operator in place": (lambda m, e: m.get_parameter("first.bias").__iadd__(1.0), CHANGE, CHANGE),
    "an index": (lambda m, e: m.get_parameter("first.bias").__setitem__(0, 1.0), CHANGE, CHANGE),
    ".data": (lambda m, e: setattr(m.get_parameter("first.bias"), "data", torch.zeros(6)), CHANGE, CHANGE),
    "out": (lambda m, e: torch.add(e["first.bias"], 1.0, out=m.get_parameter("first.bias")), CHANGE, CHANGE),
    "foreach": (lambda m, e: torch._foreach_mul_([*m.parameters()], 0.5), CHANGE, CHANGE),  # pyright: ignore[reportPrivateImportUsage]
    "an optimizer": (lambda m, e: updated(m), GRAD, GRAD),
    "clip_grad_norm_": (lambda m, e: nn.utils.clip_grad_norm_(m.parameters(), 1.0), GRAD, GRAD),
    ".grad": (lambda m, e: m.get_parameter("first.weight").grad, GRAD, GRAD),
    "zero_grad": (lambda m, e: m.zero_grad(), GRAD, GRAD),
    "register_hook": (lambda m, e: m.get_parameter("first.bias").register_hook(print), HOOK, HOOK),
}  # fmt: skip


def used(stage: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return what came of each use, and the values after two more steps."""
    sharded = sharded_case("plain", stage, clip=0.5)
    train(sharded, "plain", steps=1)
    expected, found = sharded.full_state_dict(everywhere=True), {}
    with torch.no_grad():
        for name, (use, *_) in USES.items():
            try:
                found[name] = RIGHT if (result := use(sharded.module, expected)) is True else f"returned {result!r:.80}"
            except UserError as error:
                found[name] = str(error)
    train(sharded, "plain", first=1, steps=2)
    return found, sharded.full_state_dict()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_users_do_with_a_module_is_right_or_refused(stage: int):
    (found, after), *_ = on_ranks(2, used, stage)
    for name, (_, whole, in_shards) in USES.items():
        expected = in_shards if stage == 3 else whole
        assert re.match(expected, found[name]) and len(found[name]) <= 300 and "\n" not in found[name], (
            name,
            found[name],
        )
    (never_used, _), *_ = on_ranks(2, trained, "plain", stage)
    assert same(after, never_used)


def read_at_once(stage: int) -> bool:
    sharded = sharded_case("plain", stage)
    train(sharded, "plain", steps=1)
    found = {name: parameter.detach().clone() for name, parameter in sharded.module.named_parameters()}
    return same(found, sharded.full_state_dict(everywhere=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_values_after_a_step_are_those_of_its_update(stage: int):
    assert on_ranks(2, read_at_once, stage) == [True, True]


def changed_within(stage: int) -> bool:
    sharded = sharded_case("plain", stage)
    with sharded.gathered("first.*"):
        nn.init.ones_(sharded.module.get_parameter("first.weight"))
    return bool(sharded.full_state_dict(everywhere=True)["first.weight"].eq(1.0).all())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_change_within_gathered_counts(stage: int):
    assert on_ranks(2, changed_within, stage) == [True, True]


def of_a_table() -> str:
    module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    module = megazero.shard(module, "adamw", stage=0, tables=["0"], kernels="reference").module
    assert module.get_parameter("0.weight").shape == (10, 4)
    with pytest.raises(UserError) as refused:
        module.state_dict()
    return str(refused.value)


def test_a_table_whose_rows_are_split_says_so():
    assert all(re.match("MZ-506: 0.weight .*full_state_dict", line) for line in on_ranks(2, of_a_table))


def test_a_sharded_module_says_what_it_has_instead():
    sharded = sharded_case("plain", 3)
    assert not sharded.eval().module.training and sharded.train().module.get_submodule("blocks.0").training
    for name in ("parameters", "state_dict", "zero_grad", "blocks"):  # what these cannot do in shards they say
        with pytest.raises(AttributeError, match=f"Sharded has no attribute '{name}': use sharded.module.{name}$"):
            getattr(sharded, name)
    assert not hasattr(sharded, "bogus") and (sharded.rank, sharded.ranks) == (0, 1)


def test_an_optimizer_object_is_refused_with_the_way():
    module = made("plain")
    with pytest.raises(UserError, match=r"MZ-501 .*got a AdamW; .*give lambda parameters: torch.optim"):
        megazero.shard(module, torch.optim.AdamW(module.parameters()), stage=0)  # type: ignore[arg-type]
