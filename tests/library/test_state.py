"""Checkpoints of sharded modules: any grid and stage reads any other; damage and other modules are refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.checkpoint.retention import verify
from tests.library.odd_modules import made
from tests.library.running import loss_of, on_ranks, plain, sharded_case, train

CASES = ("frozen", "buffers", "mixed", "tied")


def first_half(case: str, stage: int, folder: Path) -> None:
    sharded = sharded_case(case, stage, clip=0.5)
    train(sharded, case, 0, 2)
    assert sharded.save(folder).name == "step_00000002"


def second_half(case: str, stage: int, folder: Path) -> tuple[dict[str, Tensor], int]:
    sharded = sharded_case(case, stage, clip=0.5)
    step = sharded.load(folder)
    train(sharded, case, step, 1)
    return sharded.full_state_dict(), sharded.steps


def through(case: str, stage: int) -> dict[str, Tensor]:
    sharded = sharded_case(case, stage, clip=0.5)
    train(sharded, case, 0, 3)
    return sharded.full_state_dict()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("before", "after"), [((3, 2), (1, 2)), ((2, 2), (0, 2)), ((1, 2), (3, 2)), ((0, 2), (2, 2))])
def test_any_stage_reads_any_other(case: str, before: tuple[int, int], after: tuple[int, int], tmp_path: Path):
    on_ranks(before[1], first_half, case, before[0], tmp_path)
    verify(tmp_path / "step_00000002")
    (found, steps), *_ = on_ranks(after[1], second_half, case, after[0], tmp_path)
    expected, *_ = on_ranks(after[1], through, case, after[0])
    assert steps == 3 and list(found) == list(expected)
    for name, values in expected.items():  # the sums are those of two ranks in both
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_reads_any_other(ranks: int, tmp_path: Path):
    on_ranks(2, first_half, "frozen", 3, tmp_path)
    (states, _), *_ = on_ranks(ranks, second_half, "frozen", 3, tmp_path)
    own, *_ = on_ranks(ranks, loaded, "frozen", tmp_path)
    two, *_ = on_ranks(2, loaded, "frozen", tmp_path)
    assert all(torch.equal(own[name], two[name]) for name in two) and list(states) == list(two)


def loaded(case: str, folder: Path) -> dict[str, Tensor]:
    sharded = sharded_case(case, 3)
    sharded.load(folder)
    return sharded.full_state_dict()


def test_what_does_not_fit_is_refused(tmp_path: Path):
    on_ranks(1, first_half, "frozen", 0, tmp_path)
    with pytest.raises(UserError, match=r"MZ-508 .*expected"):
        sharded_case("tied", 0).load(tmp_path)
    with pytest.raises(UserError, match=r"MZ-508 .*state"):
        sharded_case("frozen", 0, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).load(tmp_path)
    with pytest.raises(UserError, match=r"MZ-508 .*exists already"):
        first_half("frozen", 0, tmp_path)
    with pytest.raises(UserError, match="MZ-402"):
        sharded_case("frozen", 0).load(tmp_path, step=7)
    damage(tmp_path / "step_00000002/shard_00000.safetensors")
    with pytest.raises(UserError, match="MZ-410"):
        sharded_case("frozen", 0).load(tmp_path)


def test_state_dicts_go_in_and_out():
    expected, _ = plain("buffers", 1)
    sharded = sharded_case("buffers", 3)
    sharded.load_state_dict(expected)
    found = sharded.full_state_dict()
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    made("buffers").load_state_dict(found)
    with pytest.raises(UserError, match=r"MZ-508 .*first.weight"):
        sharded.load_state_dict({name: value for name, value in expected.items() if name != "first.weight"})
    with pytest.raises(UserError, match=r"MZ-508 .*no such name"):
        sharded.load_state_dict({**expected, "more": torch.zeros(1)})


def refused_and_gone_on(stage: int, folder: Path, refusal: str) -> tuple[str, dict[str, Tensor]]:
    """Train a step, go as far as the next backward, have a load refused, and finish that step."""
    sharded = sharded_case("buffers", stage, clip=0.5)
    train(sharded, "buffers", 0, 1)
    sharded.backward(loss_of("buffers", sharded, 1, sharded.rank))
    good = sharded.full_state_dict()
    try:
        if refusal == "checkpoint":
            sharded.load(folder)
        else:
            sharded.load_state_dict({**good, **wrong_values(good, refusal)} if sharded.rank == 0 else {})
    except UserError as error:
        line = str(error)
    else:
        line = "nothing was refused"
    sharded.step()
    return line, sharded.full_state_dict()


def wrong_values(good: dict[str, Tensor], refusal: str) -> dict[str, Any]:
    """Return an entry for the last parameter of a state_dict that nobody can take."""
    name = "norm.weight"
    wrong = {
        "text": "x",
        "array": [0.0] * 6,
        "meta": good.get(name, torch.zeros(6)).to("meta"),
        "shape": torch.zeros(5),
    }
    return {name: wrong[refusal]}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ("checkpoint", r"MZ-410 .*block \d+"),
        ("text", "MZ-508 load_state_dict: norm.weight: expected \\(6,\\), got a str"),
        ("array", "MZ-508 .*got a list"),
        ("meta", "MZ-508 .*got a tensor on meta that cannot be read"),
        ("shape", "MZ-508 .*got \\(5,\\)"),
    ],
)
def test_a_refused_load_changes_nothing(stage: int, refusal: str, expected: str, tmp_path: Path):
    """The damage is in the last bytes of the last file, so that all else could have been read before."""
    on_ranks(2, first_half, "buffers", stage, tmp_path)
    damage(sorted((tmp_path / "step_00000002").glob("*.safetensors"))[-1])
    (line, found), (other, _) = on_ranks(2, refused_and_gone_on, stage, tmp_path, refusal)
    one, *rest = sorted((line, other), key=lambda said: "stopped, because rank" in said)
    assert re.search(expected, one) and all(re.search(rf"{expected}|stopped, because rank", said) for said in rest)
    assert all(torch.equal(value, found[name]) for name, value in on_ranks(2, two_steps, stage)[0].items())


def two_steps(stage: int) -> dict[str, Tensor]:
    sharded = sharded_case("buffers", stage, clip=0.5)
    train(sharded, "buffers", 0, 2)
    return sharded.full_state_dict()


def damage(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)


def test_text_for_a_state_dict_is_refused():
    with pytest.raises(UserError, match=r"MZ-508 .*expected a mapping of names to tensors, got a str"):
        sharded_case("plain", 0).load_state_dict("model.pt")  # type: ignore[arg-type]
