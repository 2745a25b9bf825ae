"""Training speed of pipeline parallelism over two ranks beside torch.distributed.pipelining, and beside its own bounds.

    python scripts/bench/pipeline.py [--pairs 15] [--json] [--only ours | peers]
    python scripts/bench/pipeline.py --only ours --before TREE       our engine beside itself in another checkout

The model: 7 blocks, hidden 512, 8 heads, vocabulary 8,192 untied (the head costs about as much as a block), sequence
256; 8 micro-batches of one sequence. Stages: 4 blocks | 3 and the head; with two chunks 2 | 2 | 2 | 1 and the head.
Torch gets the same cuts.

Every process has one thread. The reference is our engine in one process, and ratios are to half its time: 1.00 is a
perfect division of the work. The bound of a schedule is what the simulator makes of the costs of each stage's forward
and of both parts of its backward, measured in the same run, and of the update; times what two processes at once lose
to each other on this machine, each doing the reference's step for itself ("two at once", half its ratio).

fp32, no dropout, AdamW, clip 1.0, gloo over the loopback. All start from the same weights and see the same tokens, and
the largest difference between the reference's losses and theirs over all steps is printed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch
from torch import Tensor

from megazero.build.assemble import build
from megazero.build.pipeline import layers_of
from megazero.comm.grid import single
from megazero.config.schema import Config, resolved
from megazero.kernels.select import choose
from megazero.schedules.catalogue import make
from megazero.schedules.simulate import Costs, simulate
from scripts.bench.dtensor_gpt import UntiedGPT
from scripts.bench.harness import Comparison, System, compare, measure, present
from scripts.bench.other_tree import checkout, with_before, with_ratios
from scripts.bench.ours import (
    BETAS,
    CLIP,
    CPU,
    DECAY,
    EPS,
    LR,
    SEQ_LEN,
    VOCAB,
    engine_step,
    feeder,
    grid_of,
    initial_weights,
    meet,
    random_batches,
)
from scripts.bench.torch_pipeline import make_step

LAYERS, HIDDEN, HEADS, MICRO_BATCHES, RANKS = 7, 512, 8, 8, 2
OURS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # chunks
PEERS = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved", "zero-bubble": "interleaved", "zbv": "zb-v"}
COST_ROUNDS = 12
TWO_AT_ONCE = "two at once, each for itself"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["ours", "peers"])
    parser.add_argument("--before", type=checkout, metavar="TREE", help="a checkout: each of ours beside its own there")
    options = parser.parse_args()
    present(measured(options.pairs, options.only, options.before), options.json)
    return 0


def measured(pairs: int, only: str | None, before: str | None) -> Iterator[tuple[str, float, Comparison]]:
    """Yield (title, seconds that are 1.000, comparison)."""
    reference, *systems = with_before(systems_of(only), before, "pipeline", (only,))
    ideal = bounds()
    comparison = compare(reference, systems, pairs, divide_by=RANKS)
    both = next((row.ratio for row in comparison.rows if row.system == TWO_AT_ONCE), None)
    if both is not None:
        rows = [
            replace(row, bound=ideal[row.system] * both / RANKS) if row.system in ideal else row
            for row in comparison.rows
        ]
        comparison = replace(comparison, rows=rows)
    floor_s = comparison.reference_s / RANKS
    title = f"{MICRO_BATCHES} micro-batches over {RANKS} stages, 1.000 = {floor_s:.3f} s"
    yield title, floor_s, with_ratios(comparison)


def systems_of(only: str | None) -> list[System]:
    """Return all systems, the reference first."""
    systems = [System("ours, one process", our_step, (), 1)]
    if only != "peers":
        systems.append(System(TWO_AT_ONCE, one_of_two, (), 1, RANKS, exchanges=False))
        systems += [System(f"ours-{name}", our_rank, (name, chunks), 1, RANKS) for name, chunks in OURS.items()]
    if only != "ours":
        systems += [System(f"torch-{name}", torch_rank, (name, of), 1, RANKS) for name, of in PEERS.items()]
    return systems


def config_of(pipeline: int = 1, schedule: str = "1f1b", chunks: int = 1) -> Config:
    options = {
        "model": {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB, "seq_len": SEQ_LEN}
        | {"tie_embeddings": False},
        "batch": {"global": MICRO_BATCHES, "micro": 1},
        "parallel": {"pipeline": pipeline},
        "pipeline": {"schedule": schedule, "chunks": chunks},
    }
    return resolved(Config.model_validate(options))


def our_step() -> Callable[[], float]:
    """Return one training step of the engine in one process; it returns the step's loss."""
    return engine_step(config_of(), single(), choose("auto", CPU, torch.float32))


def one_of_two(rank: int, size: int, store: str) -> Callable[[], float]:
    """Return the same step, alone, beside another process that does it too."""
    return our_step()


def our_rank(schedule: str, chunks: int, rank: int, size: int, store: str) -> Callable[[], float]:
    """Return the same step on one of `size` ranks."""
    grid = grid_of(rank, size, store, pipeline=size)
    return engine_step(config_of(size, schedule, chunks), grid, choose("auto", CPU, torch.float32))


def torch_rank(name: str, schedule: str, rank: int, size: int, store: str) -> Callable[[], float]:
    """Return the same step with torch's pipelining, cut like ours."""
    meet(rank, size, store)
    config = config_of(size, schedule, OURS[schedule])
    model = UntiedGPT(LAYERS, HIDDEN, HEADS, VOCAB, SEQ_LEN)
    model.take_weights(initial_weights(config))
    layers, batches = layers_of(config), random_batches(1)

    def next_step() -> tuple[Tensor, Tensor]:
        tokens, targets = zip(*(next(batches) for _ in range(MICRO_BATCHES)), strict=True)
        return torch.cat(tokens, 1), torch.cat(targets, 1)

    adam = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    cuts = layers.of_rank(rank)
    return make_step(model, name, cuts, len(layers.parts), next_step, MICRO_BATCHES, CLIP, adam)


def bounds() -> dict[str, float]:
    """Return for each of our schedules the least ratio that its order of things allows.

    A step of one process does all the work and the whole update, a rank waits as the simulator says and updates its
    own parameters.
    """
    both = measure(costs_of_parts, RANKS)
    embedding, block, head = ([statistics.fmean(rank[i][k] for rank in both) for k in range(3)] for i in range(3))
    update = statistics.fmean(rank[3] for rank in both)
    found = {}
    alone = MICRO_BATCHES * (sum(embedding) + LAYERS * sum(block) + sum(head)) + update
    for name, chunks in OURS.items():
        layers = layers_of(config_of(RANKS, name, chunks))
        costs = [Costs(*_sum(embedding, block, head, parts)) for parts in layers.parts]
        timeline = simulate(make(name, RANKS, MICRO_BATCHES, chunks), costs)
        found[f"ours-{name}"] = (timeline.makespan + update / RANKS) / (alone / RANKS)
    return found


def _sum(embedding: list[float], block: list[float], head: list[float], parts: range) -> list[float]:
    of = [embedding, *[block] * LAYERS, head]
    return [sum(of[i][k] for i in parts) for k in range(3)]


def costs_of_parts(rank: int, size: int, store: str) -> tuple[list[float], list[float], list[float], float]:
    """Return the seconds of forward and of backward's two parts, of embedding, block and head, and of the update.

    Every block is a stage of its own; the first has the embedding too, and the last the head. Both ranks measure at
    once, each a whole model, so that they share the machine's memory as they do when they train.
    """
    built = build(config_of(1, "interleaved", LAYERS), single(), CPU, choose("auto", CPU, torch.float32))
    next_feed = feeder(config_of(), single())
    stages = list(built.pipeline.stages.values())
    seconds: list[list[list[float]]] = [[[], [], []] for _ in stages]
    updates: list[float] = []

    def timed(stage: int, kind: int, call: Callable[[], Tensor | None]) -> Tensor | None:
        began = time.perf_counter()
        result = call()
        seconds[stage][kind].append(time.perf_counter() - began)
        return result

    for step in range(COST_ROUNDS):
        built.engine.begin_step()
        for m in range(2):
            feed, x = next_feed(step), None
            for i, stage in enumerate(stages):
                x = timed(i, 0, lambda stage=stage, x=x, m=m, feed=feed: stage.forward(m, x, feed))
            gradient = None
            for i, stage in reversed(list(enumerate(stages))):
                gradient = timed(i, 1, lambda stage=stage, g=gradient, m=m: stage.backward_input(m, g))
                timed(i, 2, lambda stage=stage, m=m: stage.backward_weight(m, reduce=m == 1, last=m == 1))
        for stage in stages:
            stage.finish_reduction()
        began = time.perf_counter()
        built.engine.finish_step(LR)
        updates.append(time.perf_counter() - began)
    times = [[statistics.median(kind[4:]) for kind in stage] for stage in seconds]
    block = [statistics.median(stage[k] for stage in times[1:-1]) for k in range(3)]
    ends = ([max(times[i][k] - block[k], 0.0) for k in range(3)] for i in (0, -1))
    embedding, head = ends
    return embedding, block, head, statistics.median(updates[2:])


if __name__ == "__main__":
    sys.exit(main())
