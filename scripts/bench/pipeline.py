"""Compare pipeline parallelism over two ranks with torch.distributed.pipelining and with theoretical bounds: speed.

    python scripts/bench/pipeline.py [--launches 3] [--pairs 21] [--json] [--save]
    python scripts/bench/pipeline.py --only ours-gpipe ours-1f1b --before TREE    ours next to itself in another tree

The model: 7 blocks, hidden 512, 8 heads, vocabulary 8,192 untied (the head costs about as much as a block), sequence
256; 8 micro-batches of one sequence. Stages: 4 blocks | 3 and the head; with two chunks 2 | 2 | 2 | 1 and the head.
Torch has the same cuts.

Every process has one thread. The reference is our engine in one process, and ratios are to half its time: 1.00 is a
perfect division of the work. The bound of a schedule is the simulator's time, from the costs of each stage's forward,
of both parts of its backward, and of the update, measured in the same run. It is multiplied by the slowdown of two
processes that each do the reference's step at the same time on this machine ("two at once", half its ratio).

Ours uses memory that the ranks of a host share, and torch gloo's sockets over the loopback; zero.py and tensor.py
compare both.

fp32, no dropout, AdamW, clip 1.0. All start from the same weights and see the same tokens.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

import torch
from torch import Tensor

from megazero.builders.assemble import build
from megazero.builders.pipeline import layers_of
from megazero.comm.grid import single
from megazero.config.schema import Config, resolved
from megazero.kernels.select import choose
from megazero.schedules.catalogue import make
from megazero.schedules.simulate import Costs, simulate
from scripts.bench.dtensor_gpt import UntiedGPT
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.other_tree import add_before, pairs_of, with_before
from scripts.bench.ours import (
    ADAM,
    CLIP,
    CPU,
    LR,
    SEQ_LEN,
    SHARED,
    SOCKETS,
    VOCAB,
    engine_step,
    feeder,
    grid_of,
    initial_weights,
    meet,
    random_batches,
)
from scripts.bench.processes import Call, System, on_ranks
from scripts.bench.torch_pipeline import make_step

LAYERS, HIDDEN, HEADS, MICRO_BATCHES, RANKS = 7, 512, 8, 8, 2
OURS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # chunks
PEERS = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved", "zero-bubble": "interleaved", "zbv": "zb-v"}
COST_ROUNDS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_before(parser)
    add_options(parser)
    options = parser.parse_args()
    return run([group_of(options.only, options.before)], options)


def group_of(only: list[str], before: str | None) -> Group:
    """Return the group of all systems."""
    reference, *systems = with_before(chosen(systems_of(), only), before, "pipeline", ())
    title = f"{MICRO_BATCHES} micro-batches over {RANKS} ranks"
    here = [reference, TWO, *systems]
    return Group(title, here, divide_by=RANKS, pairs=pairs_of, bounds=bounds(), scale_bounds_by=TWO.name)


def systems_of() -> list[System]:
    """Return all systems, the reference first."""
    systems = [System("ours, one process", our_step)]
    for name, chunks in OURS.items():
        systems.append(System(f"ours-{name}", our_rank, (name, chunks), ranks=RANKS, transport=SHARED))
    for name, of in PEERS.items():
        systems.append(System(f"torch-{name}", torch_rank, (name, of), ranks=RANKS, transport=SOCKETS))
    return systems


def config_of(pipeline: int = 1, schedule: str = "1f1b", chunks: int = 1) -> Config:
    """Return the config of the model over some pipeline ranks."""
    options = {
        "model": {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB, "seq_len": SEQ_LEN}
        | {"tie_embeddings": False},
        "batch": {"global": MICRO_BATCHES, "micro": 1},
        "parallel": {"pipeline": pipeline},
        "pipeline": {"schedule": schedule, "chunks": chunks},
    }
    return resolved(Config.model_validate(options))


def our_step() -> Call:
    """Return a training step of the engine in one process."""
    return engine_step(config_of(), single())


def one_of_two(rank: int, size: int, store: str) -> Call:
    """Return `our_step`, for a process that runs next to another one that does the same."""
    return our_step()


TWO = System("two at once, each for itself", one_of_two, ranks=RANKS, has_loss=False)


def our_rank(schedule: str, chunks: int, rank: int, size: int, store: str) -> Call:
    """Return a training step of the engine on one of `size` pipeline ranks."""
    grid = grid_of(rank, size, store, pipeline=size)
    return engine_step(config_of(size, schedule, chunks), grid)


def torch_rank(name: str, schedule: str, rank: int, size: int, store: str) -> Call:
    """Return a training step with torch's pipelining and our cuts."""
    meet(rank, size, store)
    config = config_of(size, schedule, OURS[schedule])
    model = UntiedGPT(LAYERS, HIDDEN, HEADS, VOCAB, SEQ_LEN)
    model.take_weights(initial_weights(config))
    layers, batches = layers_of(config), random_batches(1)

    def next_step() -> tuple[Tensor, Tensor]:
        tokens, targets = zip(*(next(batches) for _ in range(MICRO_BATCHES)), strict=True)
        return torch.cat(tokens, 1), torch.cat(targets, 1)

    cuts = layers.of_rank(rank)
    return make_step(model, name, cuts, len(layers.parts), next_step, MICRO_BATCHES, CLIP, ADAM)


def bounds() -> dict[str, float]:
    """Return the lowest ratio that each of our schedules allows.

    One process does all passes and the whole update. A rank takes as long as the simulator says, and then updates its
    own parameters.
    """
    both = on_ranks(costs_of_parts, RANKS)
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
    """Return seconds [forward, backward input, backward weight] of embedding, block and head, and those of the update.

    Every block is a stage; the first also has the embedding, the last also the head. Both ranks measure at the same
    time, each on a whole model, so that they share the machine's memory bandwidth as in training.
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
                own = stage.gradients
                back = partial(stage.backward, m, gradient, own.backward_input, forward_follows=False)
                gradient = timed(i, 1, back)
                timed(i, 2, lambda own=own, m=m: own.backward_weight(m, reduce=m == 1, last=m == 1))
        for stage in stages:
            stage.gradients.finish_reduction()
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
