"""Train a recommender of DLRM's shape on synthetic clicks: tables split by rows, dense layers in ZeRO.

    python examples/recommender.py                                  one rank
    torchrun --nproc-per-node 2 examples/recommender.py --stage 3   two ranks

26 tables of different sizes, a bottom MLP, dot products of all pairs of features, a top MLP (Naumov et al. 2019, arXiv
1906.00091). Each row of a table is on one rank; a step sends and updates only the rows that its batch looks up.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

import megazero
from examples.training import generator

TABLES, WIDTH, DENSE = 26, 16, 13
Batch = tuple[Tensor, list[Tensor], Tensor]  # dense features [B, 13], per table ids [B, 1 to 3], clicks [B]


class Recommender(nn.Module):
    """Predict clicks from dense and categorical features.

    Args:
        rows: number of rows of each table.
    """

    def __init__(self, rows: list[int]):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, WIDTH, mode="sum") for n in rows)
        self.below = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        pairs = (len(rows) + 1) * len(rows) // 2
        self.above = nn.Sequential(nn.Linear(WIDTH + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, ids: list[Tensor]) -> Tensor:
        """Return logits [B]."""
        low = self.below(dense)
        features = torch.stack([low, *(table(i) for table, i in zip(self.tables, ids, strict=True))], dim=1)
        products = features @ features.transpose(1, 2)
        first, second = torch.triu_indices(features.shape[1], features.shape[1], offset=1)
        return self.above(torch.cat([low, products[:, first, second]], dim=1)).squeeze(1)


def rows_of_tables(largest: int) -> list[int]:
    """Return table sizes like those of click data sets: a few large tables, many small ones."""
    return [max(largest >> number, 4) for number in range(TABLES)]


def batch(rows: list[int], step: int, rank: int, size: int) -> Batch:
    """Return samples whose clicks depend on the features, so that the model can learn."""
    draw = generator(step, rank)
    dense = torch.randn(size, DENSE, generator=draw)
    ids = [torch.randint(0, n, (size, 1 + i % 3), generator=draw) for i, n in enumerate(rows)]
    score = dense[:, 0] + (ids[0][:, 0] % 2).float() - (ids[1][:, 0] % 3 == 0).float()
    return dense, ids, (score > 0.2).float()


def loss_of(logits: Tensor, clicks: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, clicks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=1, help="of the dense part")
    parser.add_argument("--rows", type=int, default=100_000, help="of the largest table")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=256, help="samples of a rank")
    options = parser.parse_args()
    rows = rows_of_tables(options.rows)
    sharded = megazero.shard(
        Recommender(rows),
        {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0},
        stage=options.stage,
        tables=[nn.EmbeddingBag],
        table_optimizer={"name": "adagrad", "lr": 0.05},
    )
    for step in range(options.steps):
        dense, ids, clicks = batch(rows, step, sharded.rank, options.batch)
        sharded.prefetch_rows({f"tables.{table}": asked for table, asked in enumerate(ids)})  # one exchange, not 26
        sharded.backward(loss_of(sharded(dense, ids), clicks))
        found = sharded.step()
        if sharded.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {found.loss:.4f}")


if __name__ == "__main__":
    main()
