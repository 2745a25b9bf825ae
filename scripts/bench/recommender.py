"""A step of a recommender against the number of rows of its tables: rows split, DDP with sparse gradients, dense FSDP2.

    python scripts/bench/recommender.py [--rows 1000 10000 100000] [--launches 3] [--pairs 21] [--save]

The model is that of examples/recommender.py: 26 tables of width 16, of which the largest has --rows rows and each
further one half as many, and dense layers. Two ranks of one thread, 256 samples each, fp32.

    ours          `megazero.shard(..., tables=...)`: each row has one owner; row-wise AdaGrad of the rows of a batch;
                  `prefetch_rows` fetches those of all tables in one exchange
    ours-sockets  the same through gloo's sockets, as the others'
    ddp-sparse    every rank has all tables, `EmbeddingBag(sparse=True)`; torch's Adagrad of the rows of a batch
    fsdp2         tables sharded as any matrix, gathered for each look-up; dense gradients, torch's Adagrad

The dense layers have AdamW everywhere. Beside the times: the megabytes that a rank sends in a step, of ours by the
ledger, of the others by what the loopback carried.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megazero
from examples.recommender import Recommender, batch, loss_of, rows_of_tables
from megazero.library import meeting
from scripts.bench.figures import Report, keep, report_of, whole
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.ours import LR, SHARED, SOCKETS, comm_of, meet
from scripts.bench.processes import Call, System, on_ranks

RANKS, SAMPLES, TABLE_LR, STEPS = 2, 256, 0.01, 3
Build = Callable[..., tuple[Call, Callable[[], int]]]  # a step, and the bytes that this rank has sent so far


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000])
    add_options(parser)
    options = parser.parse_args()
    code = run((group_of(rows, options.only) for rows in options.rows), options)
    if not options.json:
        report = bytes_report(options.rows)
        print(whole(report))
        if options.save:
            keep(Path(sys.argv[0]).stem, report)
    return code


def systems_of(rows: int) -> dict[str, tuple[Build, str]]:
    """Return how each system is built, and its transport."""
    sizes = rows_of_tables(rows)
    return {
        "ddp-sparse": (partial(ddp, sizes), SOCKETS),
        "ours": (partial(ours, sizes, SHARED), SHARED),
        "ours-sockets": (partial(ours, sizes, SOCKETS), SOCKETS),
        "fsdp2": (partial(fsdp2, sizes), SOCKETS),
    }


def group_of(rows: int, only: list[str]) -> Group:
    systems = [
        System(name, stepped, (build,), ranks=RANKS, transport=transport, has_loss=False)
        for name, (build, transport) in systems_of(rows).items()
    ]
    return Group(f"{rows:,} rows", chosen(systems, only))


def stepped(build: Build, rank: int, size: int, store: str) -> Call:
    return build(rank, size, store)[0]


def bytes_report(all_rows: list[int]) -> Report:
    """Return the report of what a rank sends in a step."""
    rows = []
    for name in systems_of(1000):
        sent = {f"{n:,} rows": max(on_ranks(partial(sent_in_a_step, systems_of(n)[name][0]), RANKS)) for n in all_rows}
        rows.append({"system": name, "columns": {f"MB, {head}": value / 1e6 for head, value in sent.items()}})
    return report_of("bytes of a step", rows, launches=1, rounds=STEPS)


def sent_in_a_step(build: Build, rank: int, size: int, store: str) -> float:
    step, sent = build(rank, size, store)
    step()
    before = sent()
    for _ in range(STEPS):
        step()
    return (sent() - before) / STEPS


def ours(sizes: list[int], transport: str, rank: int, size: int, store: str) -> tuple[Call, Callable[[], int]]:
    place, comm = comm_of(rank, size, store, transport=transport)
    meeting.be(place, comm)
    sharded = megazero.shard(
        model(sizes),
        {"name": "adamw", "lr": LR, "weight_decay": 0.0},
        stage=1,
        tables=[nn.EmbeddingBag],
        table_optimizer={"name": "adagrad", "lr": TABLE_LR},
    )
    batches = samples(sizes, rank)

    def step() -> float:
        dense, ids, clicks = next(batches)
        sharded.prefetch_rows({f"tables.{table}": asked for table, asked in enumerate(ids)})
        loss = loss_of(sharded(dense, ids), clicks)
        sharded.backward(loss)
        sharded.step()
        return loss.item()

    def sent() -> int:
        return sum(one["bytes_sent"] for purposes in sharded.traffic().values() for one in purposes.values())

    return step, sent


def ddp(sizes: list[int], rank: int, size: int, store: str) -> tuple[Call, Callable[[], int]]:
    meet(rank, size, store)
    module = model(sizes)
    for table in module.tables:
        table.sparse = True  # pyright: ignore[reportArgumentType] - a table's own option
    return torch_step(module, DistributedDataParallel(module), sizes, rank)


def fsdp2(sizes: list[int], rank: int, size: int, store: str) -> tuple[Call, Callable[[], int]]:
    meet(rank, size, store)
    module, mesh = model(sizes), init_device_mesh("cpu", (size,))
    for table in module.tables:
        fully_shard(table, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return torch_step(module, module, sizes, rank)


def torch_step(module: Recommender, wrapped: nn.Module, sizes: list[int], rank: int) -> tuple[Call, Callable[[], int]]:
    tables = list(module.tables.parameters())
    dense = [*module.below.parameters(), *module.above.parameters()]
    optimizers = torch.optim.Adagrad(tables, lr=TABLE_LR), torch.optim.AdamW(dense, lr=LR, weight_decay=0.0)
    batches = samples(sizes, rank)

    def step() -> float:
        features, ids, clicks = next(batches)
        loss = loss_of(wrapped(features, ids), clicks)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return step, lambda: loopback_bytes() // RANKS


def model(sizes: list[int]) -> Recommender:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)  # a stranger's model draws from no other
        return Recommender(sizes)


def samples(sizes: list[int], rank: int) -> Iterator[tuple]:
    number = 0
    while True:
        yield batch(sizes, number, rank, SAMPLES)
        number += 1


def loopback_bytes() -> int:
    """Return the bytes that the loopback has carried since the machine started."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    sys.exit(main())
