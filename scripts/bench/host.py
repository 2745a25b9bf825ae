"""Time the host's work per layer: plain torch, our engine, DDP, FSDP and DeepSpeed on tiny tensors.

    python scripts/bench/host.py [--groups alone unsent sent] [--launches 3] [--pairs 21] [--json] [--save]
    python scripts/bench/host.py --groups unsent --only 'ours-stage?' --before TREE    next to another checkout

A GPU is only as fast as the host that queues its work. Here a GPT of 24 layers has hidden size 16 and 4 tokens, so that
a step consists of the host's work only: Python, autograd, torch's dispatcher, and the bookkeeping of the wrappers.

    alone     one rank of one: the cost of wrapping without other ranks
    unsent    rank 0 of 2 whose collectives end at once (ours: `comm/fake_group.py`, calls of NCCL; the others: torch's
              "fake" backend): the work of a rank's host on GPUs, where the device does the transport
    sent      two ranks that communicate: ours through shared memory in the training thread, the others through gloo's
              sockets in their own threads. The excess over "unsent" is transport, which the host of a GPU does not do

Figures are processor seconds of the training thread in the fastest of 10 steps (slower ones are noise), per layer (a
step's figure / 24, including embedding, head and loss); `wall` is wall time. `step` includes the update, in which
stages 1 and 2 start to gather their parameters. `excess` is the difference from plain torch. The aims, both in
"unsent": stages 0 to 2 take at most 1.3 times plain torch, stage 3 has at most half the excess of `fsdp2-reshard`.

In "unsent" values are meaningless: receive buffers have arbitrary contents.
"""

import argparse
import importlib.util
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megazero.builders.assemble import build
from megazero.comm.context import BUCKET
from megazero.comm.fake_group import alone
from megazero.comm.grid import Grid, single
from megazero.comm.ledger import Ledger
from megazero.comm.status_board import StatusBoard
from megazero.config.schema import Batch, Config, Model, Zero, resolved
from megazero.kernels.select import choose
from megazero.pipeline.executor import BACKWARDS
from megazero.schedules.actions import Kind
from scripts.bench import data_parallel as peers
from scripts.bench import figures
from scripts.bench.harness import AGAIN, Group, Measured, add_options, chosen, measure, rows_of
from scripts.bench.other_tree import add_before, pairs_of, with_before
from scripts.bench.ours import CLIP, CPU, LR, SHARED, SOCKETS, feeder, grid_of, meet, random_batches
from scripts.bench.plain_gpt import Block
from scripts.bench.processes import Call, System
from scripts.bench.times import seconds

Phases = Iterator[None]  # endless steps; yields before a step, after its forward, its backward and its update
Place = Literal["alone", "unsent", "sent"]
Stage = Literal[0, 1, 2, 3]
PLACES: tuple[Place, ...] = ("alone", "unsent", "sent")
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
TITLES = {"alone": "one rank", "unsent": "one of two ranks, nothing is sent", "sent": "two ranks"}
LAYERS, STEPS = 24, 10  # steps of a call; the fastest counts, as the others include other work
REFERENCE = "plain torch"
_ALL = {"forward us": "forward", "backward us": "backward", "both us": "", "wall us": "wall", "step us": "step"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", choices=PLACES, nargs="+", default=list(PLACES))
    add_before(parser)
    add_options(parser)
    options = parser.parse_args()
    return figures.tell(reports(options), as_json=options.json, save=options.save)


def reports(options: argparse.Namespace) -> Iterator[figures.Report]:
    """Yield the report of each group."""
    rounds = -(-options.pairs // options.launches)
    for place in options.groups:
        systems = with_before(chosen(systems_of(place), options.only), options.before, "host", (place, "before"))
        absent = {one.name: reason for one in systems if (reason := missing(one.name)) is not None}
        here = [one for one in systems if one.name not in absent]
        group = Group(TITLES[place], here, absent=absent, again=False, pairs=pairs_of)
        measured = measure(here, options.launches, rounds)
        told = {"launches": options.launches, "rounds": rounds, "foreign": measured.foreign}
        yield figures.report_of(group.title, with_columns(rows_of(group, measured), measured), **told)


def missing(name: str) -> str | None:
    """Return why a system cannot run here; None if it can."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "not installed: make setup EXTRAS=bench"
    return None


def with_columns(rows: Sequence[dict[str, Any]], measured: Measured) -> list[dict[str, Any]]:
    """Return the rows with the microseconds per layer of each of their system's calls."""

    def columns(name: str) -> dict[str, float]:
        found = {head: 1e6 * seconds(measured.launches, call_of(name, part)) for head, part in _ALL.items()}
        return found | {"excess us": found["both us"] - 1e6 * seconds(measured.launches, REFERENCE)}

    known = measured.launches[0]
    return [row | {"columns": columns(row["system"])} if row["system"] in known else row for row in rows]


def call_of(name: str, part: str) -> str:
    """Return the name of the call that times a part of a system's step."""
    return f"{name}: {part}" if part else name


def config_of(stage: Stage, ranks: int) -> Config:
    """Return the config of the tiny GPT in a ZeRO stage."""
    shape = Model(layers=LAYERS, hidden=16, heads=2, vocab=64, seq_len=4)
    return resolved(Config(model=shape, batch=Batch(**{"global": ranks, "micro": 1}), zero=Zero(stage=stage)))


def systems_of(place: Place, ours_are: str = "ours") -> list[System]:
    """Return all systems of a group, the reference first.

    Args:
        ours_are: prefix of the names of our calls; it differs between two trees.
    """
    ranks, processes = (1, 1) if place == "alone" else (2, 2 if place == "sent" else 1)
    ours: list[tuple[str, Callable[..., Phases], Any, Stage]] = [
        (f"ours-stage{stage}", our_phases, stage, stage) for stage in STAGES
    ]
    others: list[tuple[str, Callable[..., Phases], Any, Stage]] = [
        ("ddp", torch_phases, ddp, 0),
        ("fsdp1-full-shard", torch_phases, fsdp1, 0),
        ("fsdp2-no-reshard", torch_phases, fsdp2_no_reshard, 0),
        ("fsdp2-reshard", torch_phases, fsdp2_reshard, 0),
        *((f"deepspeed-stage{stage}", deepspeed_phases, stage, 0) for stage in (1, 2, 3) if place != "unsent"),
    ]
    plain: list[tuple[str, Callable[..., Phases], Any, Stage]] = [
        (name, torch_phases, None, 0) for name in (REFERENCE, REFERENCE + AGAIN)
    ]
    told = {"ranks": processes, "has_loss": False, "times_itself": True}
    return [
        System(
            name,
            timed,
            (name.replace("ours", ours_are), phases, what, config_of(stage, ranks), place),
            transport="" if place != "sent" or what is None else SHARED if phases is our_phases else SOCKETS,
            **told,
        )
        for name, phases, what, stage in (*plain, *ours, *others)
    ]


def timed(
    name: str,
    phases: Callable[..., Phases],
    what: Any,
    config: Config,
    place: Place,
    rank: int = 0,
    size: int = 1,
    store: str = "",
) -> Mapping[str, Call]:
    """Return the calls of a system: each does `STEPS` steps and returns the minimum of one figure, in s per layer.

    Args:
        name: name of the system.
        phases: builds the system; called with `what` and all arguments after it.
    """
    steps = phases(what, config, place, rank, size, store)

    def step() -> dict[str, float]:
        marks = []
        for _ in range(4):
            next(steps)
            marks.append((time.thread_time(), time.perf_counter()))
        (began, clock), (forward, _), (backward, end), (update, _) = marks
        return {
            "forward": forward - began,
            "backward": backward - forward,
            "": backward - began,
            "wall": end - clock,
            "step": update - began,
        }

    def call(part: str) -> float:
        return min(step()[part] for _ in range(STEPS)) / LAYERS

    step()  # builds the system and connects the ranks
    return {call_of(name, part): lambda part=part: call(part) for part in _ALL.values()}


def our_phases(stage: Stage, config: Config, place: Place, rank: int, size: int, store: str) -> Phases:
    """Run our engine's steps as the trainer does; yield between their phases."""
    grid = our_grid(place, rank, size, store)
    built = build(config, grid, CPU, choose("auto", CPU, torch.float32))
    feed, pipeline = feeder(config, grid), built.pipeline
    for number in itertools.count():
        batch = feed(number)
        yield
        built.engine.begin_step()
        for action in pipeline.begin([batch], lambda batch: batch):
            if action.kind is Kind.FORWARD:
                pipeline.forward(action)
                yield
            elif action.kind in BACKWARDS:
                pipeline.backward(action)
            else:
                pipeline.communicate(action)
        pipeline.end()
        yield
        built.engine.finish_step(LR)
        yield


def our_grid(place: Place, rank: int, size: int, store: str) -> Grid:
    """Return the grid of our engine in a group."""
    if place == "sent":
        return grid_of(rank, size, store)
    if place == "alone":
        return single()
    grid = alone(0, 2, tensor=1, pipeline=1, backend="nccl", bucket=BUCKET, ledger=Ledger())
    return grid.with_comm(replace(grid.comm, status_slot=StatusBoard().status_slot(0)))


def torch_phases(
    wrap: Callable[[nn.Module], nn.Module] | None, config: Config, place: Place, rank: int, size: int, store: str
) -> Phases:
    """Run steps in plain torch style and yield between their phases; `wrap` makes the model distributed."""
    if wrap is not None:
        join(place, rank, size, store)
    model = peers.peer(config) if wrap is None else wrap(peers.peer(config))
    optimizer = torch.optim.AdamW(model.parameters(), **peers.ADAM)
    batches = random_batches(config.batch.rows, rank, config.model.vocab, config.model.seq_len)
    clip = model.clip_grad_norm_ if isinstance(model, FullyShardedDataParallel) else None
    while True:
        tokens_SB, targets_SB = next(batches)
        yield
        loss = model(tokens_SB.T, targets_SB.T)
        yield
        loss.backward()
        yield
        nn.utils.clip_grad_norm_(model.parameters(), CLIP) if clip is None else clip(CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def join(place: Place, rank: int, size: int, store: str) -> None:
    """Make the process group of a peer's rank: real, of one rank, or fake."""
    if place == "sent":
        meet(rank, size, store)
    elif place == "alone":
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def ddp(model: nn.Module) -> nn.Module:
    """Wrap a model in DDP."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if dist.get_backend() == "fake":  # its operations return no result, which DDP needs
        wrapped.register_comm_hook(None, _nothing_to_sum)
    return wrapped


def _nothing_to_sum(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket unchanged; called once per bucket, here once or twice a step."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def fsdp1(model: nn.Module) -> nn.Module:
    """Wrap a model in FSDP1 with full sharding."""
    policy, strategy = ModuleWrapPolicy({Block}), ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, sharding_strategy=strategy, use_orig_params=True, device_id=CPU
    )


def fsdp2_reshard(model: nn.Module) -> nn.Module:
    """Apply FSDP2; blocks are resharded after forward."""
    return _fsdp2(model, reshard=True)


def fsdp2_no_reshard(model: nn.Module) -> nn.Module:
    """Apply FSDP2; blocks stay gathered after forward."""
    return _fsdp2(model, reshard=False)


def _fsdp2(model: nn.Module, *, reshard: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)  # in place
    return model


def deepspeed_phases(stage: int, config: Config, place: Place, rank: int, size: int, store: str) -> Phases:
    """Run steps of DeepSpeed, set up as in `data_parallel.deepspeed_rank`; yield between their phases."""
    folder = tempfile.TemporaryDirectory()  # lives as long as this generator: DeepSpeed makes more groups in it
    deepspeed = peers.join_deepspeed(rank, size, store or f"{folder.name}/store")
    model = peers.peer(config)
    settings = {
        "train_micro_batch_size_per_gpu": config.batch.rows,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "overlap_comm": False, **peers.limits_of(config.model.hidden)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **peers.ADAM)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    batches = random_batches(config.batch.rows, rank, config.model.vocab, config.model.seq_len)
    while True:
        tokens_SB, targets_SB = next(batches)
        yield
        loss = engine(tokens_SB.T, targets_SB.T)
        yield
        engine.backward(loss)
        yield
        engine.step()
        yield


if __name__ == "__main__":
    sys.exit(main())
