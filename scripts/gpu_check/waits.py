"""Train a few steps with torch's sync debug mode set to error: the host may wait for the GPU only in named places.

The steps are those of a run, on a tiny GPT in many layouts: trainer, loader with packed upload, engine and pipeline,
the run's own choice of attention, and a snapshot of the masters in progress. In layouts of two ranks, rank 0 runs and
the other rank is an echo (`echo.py`). The first steps are not watched: they allocate, load kernels and record graphs.
On a CPU there are no waits to watch; tests/checkers/sync.py checks that case.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megazero.builders.assemble import build, feeds_of
from megazero.builders.upload import Upload
from megazero.checkpoint.snapshot import Snapshot
from megazero.comm.grid import Grid, single
from megazero.comm.host import Host
from megazero.data.batch import MicroBatch
from megazero.data.loader import BatchLoader
from megazero.kernels.select import choose
from megazero.run.attention import settle_attention
from megazero.train.schedule import TrainSchedule
from megazero.train.spikes import Spikes
from megazero.train.trainer import Trainer
from scripts.gpu_check.echo import echoing, one_rank_group
from scripts.gpu_check.findings import Asked, Row, error_line
from scripts.gpu_check.layouts import GLOBAL_BATCH, LR, MODEL, Case, config_of

# Where a step may wait for the GPU: class, method, reason.
NAMED = ((Host, "settle", "the host updates, and needs the gradients for it"),)
UNWATCHED, WATCHED = 3, 3  # steps
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TWO = {"data": 2, "micro_batch": 2}
ON_HOST = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
CASES = (
    Case("stage 0", {"micro_batch": 4}, "bf16"),
    Case("CUDA graphs", {"micro_batch": 4, "recompute": "full", "cuda_graphs": True}, "bf16"),
    Case("documents apart", {"micro_batch": 4, "mask_eod": True}, "bf16"),
    Case("a loss scale", {"micro_batch": 4}, "fp16"),
    Case("stage 1", {"stage": 1} | TWO, "bf16"),
    Case("stage 2", {"stage": 2} | TWO, "bf16"),
    Case("stage 3", {"stage": 3} | TWO, "bf16"),
    Case("stage 3, recomputed", {"stage": 3, "recompute": "full"} | TWO, "bf16"),
    Case("stage 3, inputs on the host", {"stage": 3, "recompute": "full", "offload": "cpu", "partition": True} | TWO),
    Case("stage 3, states on the host", {"stage": 3} | TWO | ON_HOST, "bf16"),
    Case("tensor 2, sequence", {"tensor": 2, "sequence": True, "micro_batch": 4}, "bf16"),
    Case("pipeline 2", {"pipeline": 2, "micro_batch": 2}, "bf16"),
)


def rows(asked: Asked) -> Iterator[Row]:
    """Yield one row per layout; a wait in another than the named places is its fault."""
    yield {"name": "named places", "number": len(NAMED), "watched": "yes" if asked.on_gpu else "nothing, on a CPU"}
    with one_rank_group(asked) as inner:
        for case in CASES:
            yield {"name": case.name, "dtype": case.dtype} | _waits(case, grid_of(case, inner), asked)


def grid_of(case: Case, inner: Any) -> Grid:
    """Return the grid of a layout: one rank, or rank 0 of two."""
    job = case.job
    return single() if job.ranks == 1 else echoing(inner, tensor=job.tensor, pipeline=job.pipeline)


def _waits(case: Case, grid: Grid, asked: Asked) -> Row:
    """Train a layout; return the number of watched steps, and the fault if there was one."""
    done = 0
    with ExitStack() as stack:
        try:
            step = stepper(case, grid, asked, stack)
            for done in range(UNWATCHED):
                step(done)
            with watched(asked):
                for done in range(UNWATCHED, UNWATCHED + WATCHED):
                    step(done)
            asked.synchronize()
        except Exception as error:
            traceback.print_exc()
            return {"steps": done, "fault": f"{error_line(error)} in {_place(error)}"}
        return {"steps": WATCHED if asked.on_gpu else 0}


@contextmanager
def watched(asked: Asked) -> Iterator[None]:
    """Make every wait for the GPU an error, except in the named places."""
    if not asked.on_gpu:
        yield
        return
    with ExitStack() as stack:
        for owner, name, _ in NAMED:
            stack.enter_context(patch.object(owner, name, excepted(getattr(owner, name))))
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def excepted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it may wait."""

    def waits(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return method(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    return waits


def stepper(case: Case, grid: Grid, asked: Asked, stack: ExitStack) -> Callable[[int], object]:
    """Return a step of a run's trainer, without the run's files; `stack` stops the threads that it starts."""
    device, host = asked.device, Host(asked.device, grid.comm.ledger, apart=True)
    ops = choose("auto", device, DTYPES[case.dtype])
    host_ops = choose("reference", torch.device("cpu"), DTYPES[case.dtype])
    model = MODEL | {"dropout": 0.0} if case.job.cuda_graphs else MODEL  # a replay repeats the recorded masks
    config = config_of(case, model)
    built = build(config, grid, device, ops, host, host_ops=host_ops)
    settle_attention(config, built.model, device, first=True)
    snapshot = Snapshot([unit.masters for unit in built.engine.units])
    feed = feeds_of(grid["tensor"], device, case.job.sequence)
    upload = Upload(device)
    mixture: Any = _Mixture(case.job.mask_eod)
    loader = BatchLoader(
        mixture,
        global_batch=GLOBAL_BATCH,
        micro_batch=case.job.micro_batch,
        num_data=case.job.data,
        pack=upload.pack if asked.on_gpu else None,
        stop=upload.stop,
    )
    stack.callback(loader.close)
    never = 10**9
    rate, nothing = _as(at=lambda updates: LR), _as()
    trainer = Trainer(
        *(built.engine, built.pipeline, lambda batch, step: feed(batch, step, True), loader, (), nothing),
        TrainSchedule(never, rate, never, never),
        _as(settle=snapshot.join, failed=False, seconds=0.0, due=lambda done: False, saved=None),
        _as(votes=lambda **_: [2], counted=lambda votes: None),
        lambda: None,
        lambda step, doing: None,
        lambda own, say: say(0, own[1] if own else None),
        Spikes(10.0, skips=True, say=str),
    )

    def step(number: int) -> None:
        snapshot.begin()
        trainer.train_step(number)

    return step


class _Mixture:
    """A mixture of one source of random tokens, with or without two documents in each window."""

    num_windows = 1 << 10

    def __init__(self, documents: bool):
        self._documents = documents

    def epochs(self, samples: int) -> None:
        """Return None: the source has no name to report."""

    def micro_batches(self, samples: np.ndarray) -> list[MicroBatch]:
        """Return samples [micro-batches, rows] as micro-batches."""
        return [self._micro_batch(rows) for rows in samples]

    def _micro_batch(self, sample_ids: np.ndarray) -> MicroBatch:
        length, count, generator = MODEL["seq_len"], len(sample_ids), torch.Generator().manual_seed(int(sample_ids[0]))
        of_rank_0 = MODEL["vocab"] // 2  # an echo has no logits of the other tensor rank's tokens
        window = torch.randint(0, of_rank_0, (length + 1, count), generator=generator)
        ids, valid_SB = torch.from_numpy(sample_ids.astype(np.int64)), torch.ones(length, count, dtype=torch.bool)
        whole = MicroBatch(window[:-1].clone(), window[1:].clone(), valid_SB, None, None, ids)
        if not self._documents:
            return whole
        parts = (length // 4, length - length // 4)
        positions = torch.cat([torch.arange(part) for part in parts])[:, None].repeat(1, count)
        return replace(whole, positions_SB=positions, documents=(parts,) * count)


def _place(error: Exception) -> str:
    """Return the innermost place in the package in the traceback of an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "megazero/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} {frames[-1].name}" if frames else "?"


def _as(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)
