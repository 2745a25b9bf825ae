"""Compare ZeRO's stages over two ranks with DDP, ZeroRedundancyOptimizer, FSDP and DeepSpeed: speed and memory.

    python scripts/bench/zero.py [--model small wide] [--accumulation 1] [--launches 3] [--pairs 21] [--json] [--save]
    python scripts/bench/zero.py --only 'ours-stage?' --before TREE   each stage next to itself in another checkout

    small   8 layers, hidden 512, 8 heads, vocabulary 8,192 tied, sequence 256, micro-batch 2      29.5M parameters
    wide    9 layers, hidden 1,024, 16 heads, the same vocabulary and sequence, micro-batch 1     122.0M

Two ranks of one thread each, fp32, no dropout, AdamW fused, clip 1.0. The reference (ratio 1.000) is two ranks of plain
torch that each do the work of one rank of DDP without communication: gradients are not reduced, and each rank updates
all of its own model. It is not a lower bound: a stage that shards the update does less. "ours, no exchange" is the same
with our engine, which separates the cost of a stage from the speed of the model.

Transport: `ours-stageN` uses memory that the ranks of a host share, as no peer does; `ours-stageN-sockets` uses gloo's
sockets over the loopback, as all peers do.

Systems run in groups, because not all fit into memory together; each group has its own reference. All systems that
communicate start from the same weights and see the same tokens; their losses are compared over all groups.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

from megazero.comm.grid import single
from megazero.config.schema import Batch, Config, Model, Zero, resolved
from scripts.bench import data_parallel as peers
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.other_tree import add_before, pairs_of, with_before
from scripts.bench.ours import SEQ_LEN, SOCKETS, TRANSPORTS, VOCAB, engine_step, grid_of
from scripts.bench.processes import Call, System

Stage = Literal[0, 1, 2, 3]
SIZES = {"small": (8, 512, 8, 2), "wide": (9, 1024, 16, 1)}  # layers, hidden, heads, micro-batch per rank
RANKS = 2
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
TOGETHER = {"small": 6, "wide": 2}  # systems in a group, besides the reference and its copy
REFERENCE = "plain torch, no exchange"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, nargs="+", default=["small"])
    parser.add_argument("--accumulation", type=int, default=1)
    add_before(parser)
    add_options(parser)
    options = parser.parse_args()
    groups = (
        group
        for model in options.model
        for group in groups_of(model, options.accumulation, options.only, options.before)
    )
    return run(groups, options)


def groups_of(model: str, accumulation: int, only: list[str], before: str | None) -> Iterator[Group]:
    """Yield the groups of systems of a model."""
    reference = plain(peers.gpt(config_of(model, 1, accumulation), RANKS))
    asked = chosen([reference, *systems_of(model, accumulation)], only)
    title = f"{model}" + (f", {accumulation} micro-batches" if accumulation > 1 else "")
    return cut(title, with_before(asked, before, "zero", (model, accumulation)), TOGETHER[model])


def plain(work: peers.Work) -> System:
    """Return the reference: two ranks of plain torch without communication."""
    return System(REFERENCE, peers.plain_rank, (work,), ranks=RANKS, has_loss=False)


def cut(title: str, systems: Sequence[System], together: int) -> Iterator[Group]:
    """Yield groups of at most `together` systems and the reference, the first one; keep pairs of two trees together."""
    reference, *asked = systems
    absent = {system.name: reason for system in asked if (reason := missing(system.name)) is not None}
    here = [one for one in asked if one.name not in absent]
    if any(one.name.startswith("before") for one in here):
        together = max(together // 2 * 2, 2)
    cuts = [here[start : start + together] for start in range(0, len(here), together)]
    for number, some in enumerate(cuts, 1):
        missed = absent if number == len(cuts) else {}
        yield Group(f"{title} ({number} of {len(cuts)})", [reference, *some], pairs=pairs_of, absent=missed)


def missing(name: str) -> str | None:
    """Return why a system cannot run here; None if it can."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "not installed: make setup EXTRAS=bench"
    return None


def systems_of(model: str, accumulation: int) -> list[System]:
    """Return all systems but the reference."""
    config = config_of(model, 1, accumulation)
    systems = [System("ours, no exchange", alone_rank, (config,), ranks=RANKS, has_loss=False)]
    for suffix, transport in TRANSPORTS.items():
        for stage in STAGES:
            arguments = (config_of(model, stage, accumulation), transport)
            systems.append(System(f"ours-stage{stage}{suffix}", our_rank, arguments, ranks=RANKS, transport=transport))
    rest: Sequence[tuple[str, Callable, tuple]] = [
        ("ddp", peers.ddp_rank, ()),
        ("zero-redundancy-optimizer", peers.zero_redundancy_rank, ()),
        ("fsdp2-no-reshard", peers.fsdp2_rank, (False,)),
        ("fsdp2-reshard", peers.fsdp2_rank, (True,)),
        *((f"deepspeed-stage{stage}", peers.deepspeed_rank, (stage,)) for stage in (1, 2, 3)),
    ]
    work = peers.gpt(config, RANKS)
    others = (System(name, build, (work, *extra), ranks=RANKS, transport=SOCKETS) for name, build, extra in rest)
    return [*systems, *others]


def config_of(model: str, stage: Stage, accumulation: int) -> Config:
    """Return the config of a model in `SIZES`."""
    layers, hidden, heads, micro = SIZES[model]
    shape = Model(layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq_len=SEQ_LEN)
    batch = Batch(**{"global": micro * RANKS * accumulation, "micro": micro})
    return resolved(Config(model=shape, batch=batch, zero=Zero(stage=stage)))


def our_rank(config: Config, transport: str, rank: int, size: int, store: str) -> Call:
    """Return a training step of the engine on one of `size` ranks."""
    return engine_step(config, grid_of(rank, size, store, transport=transport))


def alone_rank(config: Config, rank: int, size: int, store: str) -> Call:
    """Return a training step of one rank's share of the batch, without the other ranks."""
    own = config.batch.model_copy(update={"global_": config.batch.global_ // size})
    return engine_step(config.model_copy(update={"batch": own}), single())


if __name__ == "__main__":
    sys.exit(main())
