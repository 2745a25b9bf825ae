"""Time what the host takes per layer: plain torch, and our engine, alone and as rank 0 of two.

The GPT of 24 layers has hidden size 64 and 16 tokens, so a GPU waits for its host, not the host for it. Figures are
microseconds of processor time of the thread that trains, for each layer (of a step / 24; embedding, head and loss are
in it), the least of some steps. `wall` is the clock's, of forward and backward, until the device has done them.
`times_plain` is of forward and backward. An operation between the two ranks is a copy (`echo.py`). On CPUs, beside
other systems: scripts/bench/host.py.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.build.assemble import build, feeds_of
from megazero.comm.grid import Grid, single
from megazero.data.windows import MicroBatch
from megazero.kernels.select import choose
from megazero.pipeline.executor import BACKWARDS
from megazero.schedules.actions import Kind
from scripts.bench.plain_gpt import PlainGPT
from scripts.gpu_check.echo import echoing
from scripts.gpu_check.findings import Asked, Row, told
from scripts.gpu_check.layouts import MODEL, Case, config_of

LAYERS, STEPS, LR = 24, 20, 1e-4
SIZES = {"hidden": 64, "heads": 2, "kv_heads": 2, "ffn": 256, "vocab": 128, "seq_len": 16, "dropout": 0.0}
Phases = Iterator[str]  # one step after the other; pauses at its beginning and behind each phase, which it names


class _Plain(PlainGPT):
    """The same with positions that are on the device."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).flatten(0, 1), targets.flatten())


def rows(asked: Asked) -> Iterator[Row]:
    """Yield plain torch, then ours: alone, and in every stage."""
    plain = _timed("plain torch", _plain(asked), asked)
    yield plain
    systems: dict[str, Callable[[], Phases]] = {"ours, one rank": lambda: _ours(0, single(), asked)}
    for stage in range(4):
        systems[f"ours, stage {stage}, one of two"] = lambda stage=stage: _ours(stage, echoing(None), asked)
    for name, phases in systems.items():
        try:
            row = _timed(name, phases(), asked)
            yield row | {"times_plain": row["both_us"] / plain["both_us"]}
        except Exception as error:
            traceback.print_exc()
            yield {"name": name, "fault": told(error)}


def _model(asked: Asked) -> dict[str, Any]:
    return MODEL | SIZES | {"layers": 2 if asked.tiny else LAYERS}


def _timed(name: str, phases: Phases, asked: Asked) -> Row:
    """Return the least microseconds per layer of each phase."""
    layers = 2 if asked.tiny else LAYERS
    found: dict[str, list[float]] = {}
    for _ in range(2 if asked.tiny else STEPS):
        next(phases)  # builds the system in the first step
        asked.synchronize()
        began, clock, whole = time.thread_time(), time.perf_counter(), 0.0
        for phase in ("forward", "backward", "update"):
            reached = next(phases)
            assert reached == phase
            now = time.thread_time()
            found.setdefault(phase, []).append(now - began)
            whole += now - began
            if phase == "backward":
                found.setdefault("both", []).append(whole)
                asked.synchronize()
                found.setdefault("wall", []).append(time.perf_counter() - clock)
            began = time.thread_time()
    return {"name": name} | {f"{phase}_us": 1e6 * min(times) / layers for phase, times in found.items()}


def _plain(asked: Asked) -> Phases:
    """Yield between the phases of a step in plain torch style."""
    m = _model(asked)
    model: nn.Module = _Plain(m["layers"], m["hidden"], m["heads"], m["vocab"], m["seq_len"]).to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    tokens = torch.zeros(1, SIZES["seq_len"], dtype=torch.int64, device=asked.device)
    while True:
        yield "begin"
        loss = model(tokens, tokens)
        yield "forward"
        loss.backward()
        yield "backward"
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield "update"


def _ours(stage: int, grid: Grid, asked: Asked) -> Phases:
    """Yield between the phases of our engine's steps, as the trainer has them."""
    ranks, device = grid["data"].size, asked.device
    case = Case("host", {"stage": stage, "micro_batch": 1, "data": ranks})
    built = build(config_of(case, _model(asked), ranks), grid, device, choose("auto", device, torch.float32))
    tokens_SB = torch.zeros(int(SIZES["seq_len"]), 1, dtype=torch.int64, device=device)
    batch = MicroBatch(
        *(tokens_SB, tokens_SB, torch.ones_like(tokens_SB, dtype=torch.bool)),
        *(None, None, torch.zeros(1, dtype=torch.int64, device=device)),
    )
    feed, pipeline = feeds_of(grid["tensor"], device, False), built.pipeline
    while True:
        yield "begin"
        built.engine.begin_step()
        for action in pipeline.begin([batch], lambda each: feed(each, 0, True)):
            if action.kind is Kind.FORWARD:
                pipeline.forward(action)
                yield "forward"
            elif action.kind in BACKWARDS:
                pipeline.backward(action)
            else:
                pipeline.communicate(action)
        pipeline.end()
        yield "backward"
        built.engine.finish_step(LR)
        yield "update"
