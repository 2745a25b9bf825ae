"""Muon of a module's own: on two ranks in every stage as in plain torch, with groups, and across a checkpoint."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.base.errors import UserError
from megazero.library.optimizers import recipe_of
from tests.library.odd_modules import made, of_numbers
from tests.library.running import STAGES, on_ranks, sharded_case
from tests.optim.test_muon import orthogonal

LR, DECAY, B, STEPS = 1e-2, 0.1, 0.95, 3
MUON: dict[str, Any] = {"name": "muon", "lr": LR, "weight_decay": DECAY, "betas": (0.9, 0.95), "eps": 1e-3}
GROUPS: list[tuple[str, dict[str, Any]]] = [("first.*", {"name": "adamw", "lr_factor": 0.5}), ("*bias", {"clip": 0.01})]


def plain(case: str, groups: list[tuple[str, dict[str, Any]]], ranks: int) -> dict[str, Tensor]:
    """One process of plain torch: AdamW of torch, and Muon written down here."""
    module = made(case)
    named, momenta = dict(module.named_parameters()), dict[str, Tensor]()

    def options(name: str) -> dict[str, Any]:
        return next((own for pattern, own in groups if fnmatchcase(name, pattern)), {})

    matrices = [name for name, p in named.items() if p.dim() == 2 and options(name).get("name") != "adamw"]
    rest = [
        {"params": [p], "lr": LR * options(name).get("lr_factor", 1.0)}
        for name, p in named.items()
        if name not in matrices
    ]
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), eps=1e-3, weight_decay=DECAY)
    for step in range(STEPS):
        for rank in range(ranks):
            (of_numbers(module, step, rank) / ranks).backward()
        clipped = [p for name, p in named.items() if "clip" in options(name)]
        nn.utils.clip_grad_norm_(clipped, 0.01)
        adamw.step()
        with torch.no_grad():
            for name in matrices:
                parameter = named[name]
                assert parameter.grad is not None
                momentum = momenta.setdefault(name, torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - B)
                update = orthogonal(B * momentum + (1 - B) * parameter.grad)
                parameter.mul_(1 - LR * DECAY).sub_(LR * 0.2 * max(parameter.shape) ** 0.5 * update)
        module.zero_grad()
    return module.state_dict()


def trained(case: str, stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    sharded = sharded_case(case, stage, optimizer=MUON, **options)
    for step in range(STEPS):
        sharded.backward(of_numbers(sharded, step, sharded.rank))
        sharded.step()
    return sharded.full_state_dict(everywhere=True)


@pytest.mark.parametrize("groups", [[], GROUPS], ids=["alone", "groups"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_equal_plain_torch(stage: int, groups: list[tuple[str, dict[str, Any]]]) -> None:
    expected = plain("plain", groups, 2)
    for found in on_ranks(2, trained, "plain", stage, {"groups": groups}):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-11), name


def held(widths: tuple[int, ...]) -> dict[str, int]:
    """The memory for copies and whole matrices of a module with one unit for each width."""
    module = nn.Sequential(*(nn.Linear(width, width) for width in widths))
    sharded = megazero.shard(module, MUON, stage=1, units=[f"{i}" for i in range(len(widths))], kernels="reference")
    ledger = sharded._assembly.grid.comm.ledger
    return {category: ledger.held()[category] for category in ("matrices", "staging")}


def test_units_share_the_memory_for_whole_matrices() -> None:
    """They hold as much as the largest unit needs, in any order."""
    (expected, _) = on_ranks(2, held, (24,), fresh=True)
    assert min(expected.values()) > 0
    for widths in ((24, 24, 24), (8, 24, 16), (24, 8)):
        assert on_ranks(2, held, widths, fresh=True)[0] == expected


def saved(stage: int, folder: Path) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage, optimizer=MUON)
    for step in range(STEPS):
        sharded.backward(of_numbers(sharded, 0, 0))
        sharded.step()
        if step == 1:
            sharded.save(folder)
    return sharded.full_state_dict(everywhere=True)


def resumed(stage: int, folder: Path) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage, optimizer=MUON)
    sharded.load(folder)
    sharded.backward(of_numbers(sharded, 0, 0))
    sharded.step()
    return sharded.full_state_dict(everywhere=True)


def test_another_grid_goes_on(tmp_path: Path) -> None:
    (expected, *_) = on_ranks(2, saved, 3, tmp_path)
    for ranks, stage in ((1, 0), (2, 1), (3, 2)):
        for found in on_ranks(ranks, resumed, stage, tmp_path):
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-11), name


def other(folder: Path) -> str:
    sharded = sharded_case("plain", 1)
    with pytest.raises(UserError) as caught:
        sharded.load(folder)
    return str(caught.value)


def test_another_optimizer_s_state_is_refused(tmp_path: Path) -> None:
    on_ranks(1, saved, 0, tmp_path)
    (line,) = on_ranks(1, other, tmp_path)
    assert line.startswith("MZ-508 ") and "'momentum'" in line


@pytest.mark.parametrize(
    ("asked", "groups", "what"),
    [
        ({"name": "muon", "scale": "rows"}, [], "muon has no scale 'rows'"),
        ({"name": "lion", "eps": 1e-8}, [], "lion has no option 'eps'"),
        ("muon", [("*", {"name": "shampoo"})], "unknown optimizer 'shampoo'"),
        ("muon", [("*", {"beta": 1})], "muon has no option 'beta' for a group"),
        ({"name": "muon", "fused": {"*": 5}}, [], "w has 12 rows, which are not 5 equal matrices"),
    ],
)
def test_options_that_do_not_exist(asked: Any, groups: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        recipe_of(asked, groups).entry("w", (12, 4), False)


def test_which_parameters_are_matrices() -> None:
    entry = recipe_of("muon", []).entry
    assert entry("in_proj_weight", (12, 4), False).matrix is not None
    assert entry("in_proj_weight", (12, 4), False).matrix.shapes == [(4, 4)] * 3  # type: ignore[union-attr]
    names = [
        entry("a", shape, embeds).group.optimizer for shape, embeds in (((4, 4), False), ((4, 4), True), ((4,), False))
    ]
    assert names == ["muon", "adamw", "adamw"]


def test_each_optimizer_of_a_mixture_has_its_own_options() -> None:
    """Not, for example, AdamW with the betas that stand for SGD's momentum."""
    ranks = on_ranks(1, mixed)
    module = made("plain")
    named = dict(module.named_parameters())
    optimizers = [
        torch.optim.SGD([p for n, p in named.items() if not n.startswith("first")], lr=LR, momentum=0.0),
        torch.optim.AdamW([p for n, p in named.items() if n.startswith("first")], lr=LR, weight_decay=0.0),
    ]
    for step in range(STEPS):
        of_numbers(module, step, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
        module.zero_grad()
    for name, value in module.state_dict().items():
        assert torch.allclose(ranks[0][name], value, rtol=1e-10, atol=1e-11), name


def mixed() -> dict[str, Tensor]:
    groups = [("first.*", {"name": "adamw"})]
    sharded = sharded_case("plain", 1, optimizer={"name": "sgd", "lr": LR}, groups=groups)
    for step in range(STEPS):
        sharded.backward(of_numbers(sharded, step, 0))
        sharded.step()
    return sharded.full_state_dict(everywhere=True)
