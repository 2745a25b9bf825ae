"""Compare the step of Muon with owners, of Muon computed by every rank, and of AdamW, over two ranks.

    python scripts/bench/optimizers.py [--only 'muon*'] [--launches 3] [--pairs 21] [--json] [--save]

    8 layers, hidden 512, 8 heads, vocabulary 8,192 tied, sequence 256, micro-batch 2      29.5M parameters

Two ranks of one thread each, fp32, in memory that they share, clip 1.0. The reference is AdamW in stage 1. "every rank"
is Muon in stage 1 with `zero.shard_ranks: 1`: each rank updates all matrices by itself, and sends nothing of them. The
second table has the bytes that a rank sends in a step for whole matrices, and for gradients and parameters, and the
bytes of its buffers for matrices, from the ledger. The third compares replicas after a step with the step itself.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

from megazero.config.schema import Batch, Config, Model, Optimizer, Precision, Zero, resolved
from megazero.run.replicas import differences
from scripts.bench.figures import Report, report_of
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.ours import SEQ_LEN, VOCAB, built_step, grid_of
from scripts.bench.processes import Call, System, on_ranks

Stage = Literal[0, 1, 2, 3]
LAYERS, HIDDEN, HEADS, MICRO, RANKS = 8, 512, 8, 2, 2
REFERENCE, EVERY_RANK = "adamw, stage 1", "muon, every rank"
NARROW = "adamw, stage 1, state in bf16"
COUNTED = 3  # steps whose bytes are counted, or that are compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    systems = chosen(list(systems_of()), options.only)
    return run([Group("optimizers", systems)], options, [partial(bytes_of, systems), replicas])


def systems_of() -> Iterator[System]:
    """Yield all systems, the reference first."""
    yield _system(REFERENCE, config_of("adamw", 1))
    for stage in (0, 1, 2, 3):
        yield _system(f"muon, stage {stage}", config_of("muon", stage))
    yield _system(EVERY_RANK, config_of("muon", 1, shard_ranks=1))
    for name in ("lion", "sgd"):
        yield _system(f"{name}, stage 1", config_of(name, 1))
    yield _system(NARROW, config_of("adamw", 1, moments="bf16"))


def _system(name: str, config: Config) -> System:
    return System(name, step_rank, (config,), ranks=RANKS, has_loss=False)


def config_of(name: Any, stage: Stage, *, shard_ranks: int | None = None, moments: Any = "fp32") -> Config:
    """Return the config of a system."""
    shape = Model(layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq_len=SEQ_LEN)
    batch = Batch(**{"global": MICRO * RANKS, "micro": MICRO})
    zero = Zero(stage=stage, shard_ranks=shard_ranks)
    optimizer = Optimizer(name=name, moments=moments)
    return resolved(Config(model=shape, batch=batch, zero=zero, optimizer=optimizer, precision=Precision()))


def step_rank(config: Config, rank: int, size: int, store: str) -> Call:
    """Return a training step on one of two ranks."""
    grid = grid_of(rank, size, store, shard_ranks=config.zero.shard_ranks)
    return built_step(config, grid)[1]


def bytes_rank(config: Config, rank: int, size: int, store: str) -> dict[str, float]:
    """Train some steps; return the bytes of a step by purpose, and those of the buffers."""
    grid = grid_of(rank, size, store, shard_ranks=config.zero.shard_ranks)
    _, step = built_step(config, grid)
    ledger = grid.comm.ledger
    step()
    before = _sent(ledger)
    for _ in range(COUNTED):
        step()
    found = {purpose: (size - before.get(purpose, 0)) / COUNTED for purpose, size in _sent(ledger).items()}
    held = {category: size.now for category, size in ledger.bytes.items()}
    return {**found, "held matrices": held.get("matrices", 0), "held optimizer": held.get("optimizer", 0)}


def _sent(ledger: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for of_axis in ledger.traffic_as_dict().values():
        for purpose, flow in of_axis.items():
            found[purpose] = found.get(purpose, 0) + flow["bytes_sent"]
    return found


def bytes_of(systems: Sequence[System]) -> Report:
    """Return the table of bytes."""
    rows = []
    for system in systems:
        found, *_ = on_ranks(partial(bytes_rank, *system.arguments), RANKS)
        columns = {
            "MB for matrices": found.get("matrices", 0) / 1e6,
            "MB of gradients and parameters": (found.get("gradients", 0) + found.get("parameters", 0)) / 1e6,
            "MB of buffers for matrices": found["held matrices"] / 1e6,
            "MB of optimizer state": found["held optimizer"] / 1e6,
        }
        rows.append({"system": system.name, "columns": columns})
    return report_of("bytes of a step, on rank 0", rows, launches=1)


def replicas_rank(config: Config, rank: int, size: int, store: str) -> tuple[float, float]:
    """Return the seconds of a step, and those of a comparison of replicas; the least of some."""
    built, step = built_step(config, grid_of(rank, size, store))
    step()
    seconds: list[list[float]] = [[], []]
    for _ in range(2 * COUNTED):
        for into, call in zip(
            seconds, (step, lambda: differences(built.engine.units, built.engine.optimizer.runs)), strict=True
        ):
            began = time.perf_counter()
            call()
            into.append(time.perf_counter() - began)
    return min(seconds[0]), min(seconds[1])


def replicas() -> Report:
    """Return the table of comparisons of replicas."""
    rows = []
    for stage in (0, 1, 2, 3):
        name, config = f"adamw, stage {stage}", config_of("adamw", stage)
        step, check = map(max, zip(*on_ranks(partial(replicas_rank, config), RANKS), strict=True))
        columns = {"step s": step, "comparison s": check, "% of 100 steps": check / step}
        rows.append({"system": name, "columns": columns})
    return report_of("comparison of replicas every 100 steps", rows, launches=1)


if __name__ == "__main__":
    sys.exit(main())
