"""Tables whose rows are split: as one process, traffic and memory by formula, checkpoints of any grid."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import megazero
from examples.recommender import TABLES, WIDTH, Recommender, batch, loss_of, rows_of_tables
from megazero import Sharded
from megazero.base.errors import UserError
from megazero.library import row_groups
from tests.library.running import on_ranks

ROWS, STEPS, SAMPLES = rows_of_tables(64), 3, 5
ADAGRAD = {"name": "adagrad", "lr": 0.05}
ADAM = {"name": "adam", "lr": 0.05}


def model() -> Recommender:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Recommender(ROWS).double()


def sharded_model(stage: int, table_optimizer: Any, **options: Any) -> Sharded:
    told = {"tables": ["tables.*"], "table_optimizer": table_optimizer, "kernels": "reference", **options}
    return megazero.shard(model(), {"name": "adamw", "lr": 0.01, "eps": 1e-3}, stage=stage, **told)


def loss(module: Callable[..., Tensor], step: int, rank: int) -> Tensor:
    dense, ids, clicks = batch(ROWS, step, rank, SAMPLES)
    return loss_of(module(dense.double(), ids), clicks.double())


def prefetch(sharded: Sharded, step: int) -> None:
    _, ids, _ = batch(ROWS, step, sharded.rank, SAMPLES)
    sharded.prefetch_rows({f"tables.{number}": one for number, one in enumerate(ids)})


def trained(stage: int, table_optimizer: Any, clip: float, ahead: bool) -> tuple[dict[str, Tensor], list[float]]:
    sharded = sharded_model(stage, table_optimizer, clip=clip)
    norms = []
    for step in range(STEPS):
        for micro in range(2):
            if ahead:
                prefetch(sharded, 2 * step + micro)
            sharded.backward(loss(sharded, 2 * step + micro, sharded.rank) / 2, last=micro == 1)
        norms.append(sharded.step().grad_norm)
    return sharded.full_state_dict(), norms


def plain(table_optimizer: dict[str, Any], clip: float, ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """One process of plain torch: AdamW, and for tables torch's SparseAdam, or row-wise AdaGrad by its formula."""
    module, norms = model(), []
    dense = [p for n, p in module.named_parameters() if not n.startswith("tables")]
    tables = [p for n, p in module.named_parameters() if n.startswith("tables")]
    adamw = torch.optim.AdamW(dense, lr=0.01, eps=1e-3, weight_decay=0.01)
    sparse = torch.optim.SparseAdam(tables, lr=0.05)
    sums = [torch.zeros(len(table), dtype=table.dtype) for table in tables]
    for step in range(STEPS):
        for micro in range(2):
            for rank in range(ranks):
                (loss(module, 2 * step + micro, rank) / 2 / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip or 1e9)))
        adamw.step()
        for table, total in zip(tables, sums, strict=True):
            gradient = table.grad
            assert gradient is not None
            touched = gradient.any(1).nonzero().flatten()
            if table_optimizer["name"] == "adam":
                table.grad = torch.sparse_coo_tensor(
                    touched[None], gradient[touched], table.shape, check_invariants=True
                )
                continue
            total[touched] += gradient[touched].square().mean(1)
            with torch.no_grad():
                table[touched] -= 0.05 * gradient[touched] / (total[touched].sqrt() + 1e-10)[:, None]
        if table_optimizer["name"] == "adam":
            sparse.step()
        module.zero_grad()
    return module.state_dict(), norms


@pytest.mark.parametrize("table_optimizer", [ADAGRAD, ADAM], ids=lambda options: options["name"])
@pytest.mark.parametrize(
    ("stage", "ranks", "ahead"), [(0, 1, False), (1, 1, True), (1, 2, False), (3, 2, True), (3, 4, False), (2, 4, True)]
)
def test_a_recommender_trains_as_in_one_process(table_optimizer: dict[str, Any], stage: int, ranks: int, ahead: bool):
    expected, norms = plain(table_optimizer, 0.05, ranks)
    (found, found_norms), *_ = on_ranks(ranks, trained, stage, table_optimizer, 0.05, ahead)
    assert list(found) == list(expected) and found_norms == pytest.approx(norms, rel=1e-12)
    for name, values in expected.items():
        assert torch.allclose(found[name], values, rtol=1e-11, atol=1e-12), name


def with_skipped_steps(stage: int, skipped: tuple[int, ...]) -> dict[str, Tensor]:
    """Train the steps, and before some of them steps with losses that are not finite."""
    sharded = sharded_model(stage, ADAM)
    for step in range(STEPS):
        for _ in range(skipped.count(step)):
            sharded.backward(loss(sharded, step + 10, sharded.rank) * float("nan"))
            assert sharded.step().skipped
        sharded.backward(loss(sharded, step, sharded.rank))
        sharded.step()
    return sharded.full_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_lazy_adam_counts_the_steps_that_were_not_skipped(stage: int):
    expected, *_ = on_ranks(2, with_skipped_steps, stage, ())
    found, *_ = on_ranks(2, with_skipped_steps, stage, (0, 2, 2))
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def one_step(stage: int, ahead: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    sharded = sharded_model(stage, ADAGRAD)
    assert "row ids" not in sharded.traffic()["world"]
    if ahead:
        prefetch(sharded, 0)
    sharded.backward(loss(sharded, 0, sharded.rank))
    sharded.step()
    return sharded.traffic(), sharded.memory()


@pytest.mark.parametrize("ahead", [False, True])
def test_traffic_and_memory_are_the_formulas(ahead: bool):
    """Of each distinct row that belongs to another rank: its id, its values to this rank, its gradient back."""
    ranks = 2
    traffic, memory = zip(*on_ranks(ranks, one_step, 0, ahead), strict=True)
    asked = [[0] * ranks for _ in range(ranks)]  # by rank, of rank
    for rank in range(ranks):
        _, ids, _ = batch(ROWS, 0, rank, SAMPLES)
        for rows, of_table in zip(ROWS, ids, strict=True):
            for owner in (of_table.unique() // -(-rows // ranks)).tolist():
                asked[rank][owner] += 1
    for rank, sent in enumerate(found["world"] for found in traffic):
        other = 1 - rank
        assert sent["row ids"]["elements"] == asked[rank][other]
        assert sent["row values"]["elements"] == asked[other][rank] * WIDTH
        assert sent["row gradients"]["elements"] == asked[rank][other] * WIDTH
        assert sent["row counts"]["elements"] == (1 if ahead else TABLES) * (ranks + 2) * (ranks - 1)
    own = [sum(min((k + 1) * -(-n // ranks), n) - min(k * -(-n // ranks), n) for n in ROWS) for k in range(ranks)]
    dense = [found["parameters"]["now"] - 8 * WIDTH * rows for found, rows in zip(memory, own, strict=True)]
    assert dense[0] == dense[1] < 8 * 40_000 and sum(own) == sum(ROWS)
    assert [found["optimizer"]["now"] - 2 * dense[0] for found in memory] == [8 * rows for rows in own]


@patch.object(row_groups, "PIECE", 3 * WIDTH)  # tables are sent in pieces of three rows
def saved(stage: int, folder: Path) -> None:
    sharded = sharded_model(stage, ADAM)
    for step in range(2):
        sharded.backward(loss(sharded, step, 0))  # the same samples on every rank: any number of ranks computes alike
        sharded.step()
    sharded.save(folder)


@patch.object(row_groups, "PIECE", 3 * WIDTH)
def went_on(stage: int, folder: Path | None) -> dict[str, Tensor]:
    sharded = sharded_model(stage, ADAM)
    first = 0 if folder is None else sharded.load(folder)
    for step in range(first, 3):
        sharded.backward(loss(sharded, step, 0))
        sharded.step()
    return sharded.full_state_dict()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 2)])
def test_any_number_of_ranks_reads_any_other(before: int, after: int, tmp_path: Path):
    on_ranks(before, saved, 3, tmp_path)
    found = on_ranks(after, went_on, 1, tmp_path)[0]
    expected = on_ranks(1, went_on, 0, None)[0]
    assert all(torch.allclose(found[name], values, rtol=1e-12, atol=1e-13) for name, values in expected.items())


class Texts(nn.Module):
    """A padded embedding and a padded bag."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH, padding_idx=3)
        self.bag = nn.EmbeddingBag(7, WIDTH, mode="mean", padding_idx=0, include_last_offset=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1) + self.bag(ids.flatten() % 7, offsets)).square().mean()


def texts() -> Texts:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Texts().double()


def ids_of(rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(0, 11, (4, 3), generator=draw), torch.tensor([0, 2, 5, 9, 12])


def trained_on_texts() -> dict[str, Tensor]:
    sharded = megazero.shard(texts(), "adamw", stage=1, kernels="reference", tables=[nn.Embedding, "bag"])
    sharded.backward(sharded(*ids_of(sharded.rank)))
    sharded.step()
    return sharded.full_state_dict()


def test_padding_gets_no_gradient():
    module = texts()
    for rank in range(2):
        (module(*ids_of(rank)) / 2).backward()
    found, *_ = on_ranks(2, trained_on_texts)
    for table in (module.words, module.bag):
        gradient = table.weight.grad
        assert gradient is not None and table.padding_idx is not None
        assert not gradient[table.padding_idx].any() and gradient.any()
        total = gradient.square().mean(1, keepdim=True)
        with torch.no_grad():
            table.weight -= 0.01 * gradient / (total.sqrt() + 1e-10)
    for name, values in module.state_dict().items():
        if "head" not in name:
            assert torch.allclose(found[name], values, rtol=1e-12, atol=1e-13), name


def from_meta(ranks_rows: int) -> tuple[dict[str, Tensor], int]:
    with torch.device("meta"):
        module = Recommender([ranks_rows])
    sharded = megazero.shard(module, "adamw", stage=3, kernels="reference", tables=["tables.0"])
    return sharded.full_state_dict(), sharded.memory()["parameters"]["peak"]


def test_a_table_on_meta_is_never_whole():
    one, two = on_ranks(1, from_meta, 1001)[0][0], on_ranks(2, from_meta, 1001)
    assert torch.equal(one["tables.0.weight"], two[0][0]["tables.0.weight"])
    assert one["tables.0.weight"].std() == pytest.approx(1.0, rel=0.05)
    assert two[1][1] - two[0][1] == -4 * WIDTH  # 501 rows and 500


def no_embedding() -> None:
    sharded_model(0, ADAGRAD, tables=["below.0"])


def renormed() -> None:
    module = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 2))
    megazero.shard(module, "adamw", stage=0, tables=["0"])


def shared() -> None:
    module = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))
    module[1].weight = module[0].weight  # type: ignore[union-attr]
    megazero.shard(module, "adamw", stage=0, tables=["0"])


def no_row() -> None:
    sharded = megazero.shard(texts(), "adamw", stage=0, kernels="reference", tables=["words"])
    sharded(torch.tensor([[11]]), torch.tensor([0, 1]))


def other_ids() -> None:
    sharded = sharded_model(0, ADAGRAD)
    prefetch(sharded, 0)
    loss(sharded, 1, 0)


def no_table() -> None:
    sharded_model(0, ADAGRAD).prefetch_rows({"below.0": torch.tensor([0])})


def other_optimizer() -> None:
    sharded_model(0, "lamb")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (no_embedding, "MZ-511.*below.0 is a Linear"),
        (renormed, "MZ-511.*max_norm"),
        (shared, "MZ-511.*shares its weight"),
        (no_row, "MZ-511.*words.weight: row 11 does not exist in a table of 11"),
        (other_ids, "MZ-511.*tables.0.weight: looks up other ids"),
        (no_table, "MZ-511.*below.0 is not a table"),
        (other_optimizer, "MZ-501.*'lamb'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_use_gets_one_clear_line(wrong: Callable[[], None], line: str):
    with pytest.raises(UserError) as caught:
        wrong()
    assert re.search(line, str(caught.value))


def test_sizes_fall_by_halves():
    assert len(ROWS) == TABLES and all(a >= b for a, b in pairwise(ROWS))


def largest() -> tuple[int, int, int, int]:
    with torch.device("meta"):
        module = Recommender([50_000_000, 10])
    sharded = megazero.shard(module, "adamw", stage=3, kernels="reference", tables=["tables.0"])
    dense, ids, clicks = batch([50_000_000, 10], 0, sharded.rank, 64)
    sharded.backward(loss_of(sharded(dense, ids), clicks))
    sharded.step()
    sent = sharded.traffic()["world"]
    held = sharded.memory()
    return (
        held["parameters"]["now"],
        held["optimizer"]["now"],
        sent["row ids"]["elements"],
        sent["row values"]["elements"],
    )


@pytest.mark.full
def test_fifty_million_rows_on_four_ranks():
    """3.2 GB of rows: 800 MB on each rank, 50 MB of state; a step sends what its 64 samples ask for."""
    for held, state, ids, values in on_ranks(4, largest):
        assert 0 <= held - 50_000_000 // 4 * WIDTH * 4 < 50_000
        assert 0 < ids <= 64 and values <= 4 * 64 * WIDTH
        assert 0 <= state - 50_000_000 < 150_000
