"""Training speed of tensor parallelism over two ranks beside torch DTensor.

    python scripts/bench/tensor.py [--model small wide] [--pairs 15] [--json]
    python scripts/bench/tensor.py --only ours --before TREE         our engine beside itself in another checkout

    small   8 layers, hidden 512, 8 heads, vocabulary 8,192 untied, sequence 256, micro-batch 4     33.7M parameters
    wide    9 layers, hidden 1,024, 16 heads, the same vocabulary and sequence, micro-batch 2      130.4M

Every process has one thread, so two ranks have twice the cores of one process. The reference is our engine in one
process, and ratios are to half its time: 1.00 is a perfect division of the work, 2.00 the reference itself.

fp32, no dropout, AdamW, clip 1.0, gloo over the loopback. All start from the same weights and see the same tokens, and
the largest difference between the reference's losses and theirs over all steps is printed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch

from megazero.comm.grid import single
from megazero.config.schema import Batch, Config, Model, Parallel, resolved
from megazero.kernels.select import choose
from scripts.bench import recomputing_peers
from scripts.bench.harness import Comparison, System, compare, present
from scripts.bench.other_tree import checkout, with_before, with_ratios
from scripts.bench.ours import (
    CPU,
    SEQ_LEN,
    VOCAB,
    engine_step,
    grid_of,
)

SIZES = {"small": (8, 512, 8, 4), "wide": (9, 1024, 16, 2)}  # layers, hidden, heads, micro-batch
RANKS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, nargs="+", default=["small"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[""], help="systems whose name begins so, beside the reference")
    parser.add_argument("--before", type=checkout, metavar="TREE", help="a checkout: each of ours beside its own there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    present(measured(options.model, options.pairs, tuple(options.only), options.before), options.json)
    return 0


def measured(
    models: list[str], pairs: int, only: tuple[str, ...], before: str | None
) -> Iterator[tuple[str, float, Comparison]]:
    """Yield (title, seconds that are 1.000, comparison) of each model."""
    for model in models:
        reference, *others = systems_of(model)
        chosen = [reference, *(system for system in others if system.name.startswith(only))]
        reference, *systems = with_before(chosen, before, "tensor", (model,))
        comparison = with_ratios(compare(reference, systems, pairs, divide_by=RANKS))
        floor_s = comparison.reference_s / RANKS
        yield f"{model}, 1.000 = {floor_s:.3f} s", floor_s, comparison


def systems_of(model: str) -> list[System]:
    """Return all systems, the reference first."""
    systems = [
        System(f"ours, one process, {model}", our_step, (model,), 1),
        System(f"plain torch, one process, {model}", plain_step, (model,), 1),
    ]
    for name, build in (("ours", our_rank), ("dtensor", dtensor_rank)):
        for suffix, sequence in (("", False), ("-sequence", True)):
            systems.append(System(f"{name}-tp{RANKS}{suffix}, {model}", build, (model, sequence), 1, RANKS))
    return systems


def config_of(model: str, tensor: int = 1, sequence: bool = False) -> Config:
    layers, hidden, heads, micro = SIZES[model]
    shape = Model(layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq_len=SEQ_LEN, tie_embeddings=False)
    batch = Batch(**{"global": micro, "micro": micro})
    return resolved(Config(model=shape, batch=batch, parallel=Parallel(tensor=tensor, sequence=sequence)))


def our_step(model: str) -> Callable[[], float]:
    """Return one training step of the engine in one process; it returns the step's loss."""
    return engine_step(config_of(model), single(), choose("auto", CPU, torch.float32))


def our_rank(model: str, sequence: bool, rank: int, size: int, store: str) -> Callable[[], float]:
    """Return the same step on one of `size` ranks."""
    grid = grid_of(rank, size, store, tensor=size)
    return engine_step(config_of(model, size, sequence), grid, choose("auto", CPU, torch.float32))


def plain_step(model: str) -> Callable[[], float]:
    """Return one training step of plain torch in one process."""
    return recomputing_peers.plain_step(config_of(model), again=False)


def dtensor_rank(model: str, sequence: bool, rank: int, size: int, store: str) -> Callable[[], float]:
    """Return one training step of the same model spread with DTensor, on one of `size` ranks."""
    return recomputing_peers.spread_step(config_of(model, sequence=sequence), "none", rank, size, store)


if __name__ == "__main__":
    sys.exit(main())
