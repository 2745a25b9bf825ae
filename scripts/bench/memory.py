"""Memory that recompute, Pa and offload spare, and what they cost in time, beside torch.utils.checkpoint.

    python scripts/bench/memory.py [--pairs 15] [--json]

    one process    ours without and with recompute (the core of attention, whole blocks), and a model of plain torch
                   modules without and with torch.utils.checkpoint around every block (early stop on, as by default)
    tp=2           two tensor ranks: recompute, Pa, Pa+cpu, and optimizer state on the host; the reference is the same
                   without. The host is declared apart, as beside a GPU, so that every copy is made
    bytes          of each on a rank of tp=2 and tp=4, by category of the ledger

The model has 12 blocks of hidden size 512 with 8 heads, vocabulary 8,192 (tied), sequences of 256 tokens, micro-batch
8, fp32, no dropout; every process has one thread.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch
from torch.utils.checkpoint import checkpoint

from megazero.build import build
from megazero.config import Batch, Config, Memory, Model, Offload, Optimizer, Parallel, Zero, resolved
from megazero.kernels.choice import choose
from megazero.observe.allocations import Allocations
from megazero.parallel.grid import single
from megazero.parallel.host import Host
from scripts.bench.harness import Comparison, System, compare, loss_difference, measure, report, table
from scripts.bench.ours import (
    BETAS,
    CLIP,
    CPU,
    DECAY,
    EPS,
    LR,
    SEQ_LEN,
    VOCAB,
    feeder,
    grid_of,
    initial_weights,
    random_batches,
)
from scripts.bench.plain_gpt import PlainGPT

LAYERS, HIDDEN, HEADS, MICRO = 12, 512, 8, 8
MODES: dict[str, tuple[Memory, Offload]] = {
    "none": (Memory(), Offload()),
    "selective": (Memory(recompute="selective"), Offload()),
    "full": (Memory(recompute="full"), Offload()),
    "Pa": (Memory(recompute="full", partition=True), Offload()),
    "Pa+cpu": (Memory(recompute="full", partition=True, offload=True), Offload()),
    "offload": (Memory(), Offload(optimizer="cpu")),
}
IN_ONE = ("none", "selective", "full")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reports = []
    for title, comparison in timed(options.pairs):
        difference = loss_difference(comparison)
        reports.append({"title": title, "loss_difference": difference} | report(comparison, comparison.reference_s))
        if not options.json:
            print(table(f"{title}, losses within {difference:.1e}", comparison), end="\n\n", flush=True)
    held = {tensor: {mode: measure(Bytes(mode), tensor)[0] for mode in MODES} for tensor in (2, 4)}
    if options.json:
        print(json.dumps({"tables": reports, "bytes": held}, indent=1))
        return 0
    for tensor, modes in held.items():
        print("\n".join(bytes_table(tensor, modes)), end="\n\n")
    return 0


def timed(pairs: int) -> Iterator[tuple[str, Comparison]]:
    systems = [System(f"plain torch{', torch.utils.checkpoint' * again}", plain_step, (again,), 1) for again in (0, 1)]
    systems += [System(f"ours, {mode}", our_step, (mode,), 1) for mode in IN_ONE]
    yield "one process", compare(systems[0], systems[1:], pairs)
    ranks = [System(f"tp=2, {mode}", our_rank, (mode,), 1, 2) for mode in MODES]
    yield "tp=2", compare(ranks[0], ranks[1:], pairs)


def config_of(mode: str, tensor: int = 1) -> Config:
    memory, offload = MODES[mode]
    return resolved(
        Config(
            model=Model(layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq_len=SEQ_LEN),
            batch=Batch.model_validate({"global": MICRO, "micro": MICRO}),
            parallel=Parallel(tensor=tensor),
            memory=memory,
            zero=Zero(stage=1, offload=offload),
            optimizer=Optimizer(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, clip=CLIP),
        )
    )


def our_step(mode: str) -> Callable[[], float]:
    return _step(mode, single())[0]


def our_rank(mode: str, rank: int, size: int, store: str) -> Callable[[], float]:
    return _step(mode, grid_of(rank, size, store, tensor=size))[0]


def _step(mode: str, grid) -> tuple[Callable[[], float], Callable[[], dict[str, int]]]:
    """One training step, and what is held then."""
    config, ledger = config_of(mode, grid.tensor.size), grid.world.wire.ledger
    built = build(config, grid, CPU, choose("auto", CPU, torch.float32), Host(CPU, ledger, apart=True))
    feed = feeder(config, grid)
    steps = iter(range(1 << 30))

    def step() -> float:
        now = next(steps)
        built.engine.begin_step()
        built.pipeline.train([feed(now)], lambda batch: batch)
        return built.engine.finish_step(LR).loss.item()

    return step, lambda: {category: held.peak for category, held in ledger.bytes.items()}


class Bytes:
    """What a rank holds, by category; activations as the most that its second step allocates."""

    def __init__(self, mode: str):
        self.mode = mode

    def __call__(self, rank: int, size: int, store: str) -> dict[str, int]:
        step, held = _step(self.mode, grid_of(rank, size, store, tensor=size))
        step()
        with Allocations() as counted:
            step()
        return held() | {"activations": counted.peak}


def bytes_table(tensor: int, modes: dict[str, dict[str, int]]) -> Iterator[str]:
    categories = list(dict.fromkeys(category for held in modes.values() for category in held))
    yield f"MB on a rank of tp={tensor}"
    yield ""
    yield "| | " + " | ".join(categories) + " | on the device |"
    yield "|---" * (len(categories) + 2) + "|"
    for mode, held in modes.items():
        cells = [f"{held.get(category, 0) / 1e6:,.1f}" for category in categories]
        device = sum(size for category, size in held.items() if not category.startswith("host_"))
        yield f"| {mode} | {' | '.join(cells)} | {device / 1e6:,.1f} |"


def plain_step(again: int) -> Callable[[], float]:
    """One training step of plain torch modules, with torch.utils.checkpoint around every block or without."""
    model = PlainGPT(LAYERS, HIDDEN, HEADS, VOCAB, SEQ_LEN)
    model.take_weights(initial_weights(config_of("none")))
    if again:
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(
                forward, x, use_reentrant=False, preserve_rng_state=False
            )
    decays = [p for p in model.parameters() if p.dim() > 1 and p is not model.positions.weight]
    rest = [p for p in model.parameters() if p.dim() < 2 or p is model.positions.weight]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    batches = random_batches(MICRO)

    def step() -> float:
        tokens_SB, targets_SB = next(batches)
        loss = model(tokens_SB.T.contiguous(), targets_SB.T.contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    sys.exit(main())
