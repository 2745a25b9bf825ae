"""Measure training steps of ours and of other systems, in shapes with published figures.

    gpt       GPT-2 1.5B, 1,024 tokens: 32 sequences per step
    llama     Llama 3.2 1B, 4,096 tokens: 8 sequences per step
    whole     Llama 2 7B, all of it in the memory of one GPU
    hosted    the same with the optimizer on the host
    variants  GPT-2 1.5B with our kernels, with torch.compile's, and with the loss in chunks

Ours runs with several micro-batch sizes on equal weights and tokens, so its losses must agree. The others start from
other weights; their losses are of the same size, and show that they learn. `host_s` is the time in which the host
queues a step: if it is as long as the step, the device waits for the host. Published figures are for several GPUs and
other batches, as their names say; in a shorter step the update has a larger share.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megazero.comm.grid import single
from megazero.kernels.select import choose
from scripts.gpu_check import peers
from scripts.gpu_check.findings import Asked, Row, error_line
from scripts.gpu_check.layouts import Case
from scripts.gpu_check.speed import Shape, Step, free, measured, stepper
from scripts.gpu_check.speed import gpt as gpt_of
from scripts.gpu_check.speed import llama as llama_of

GPT = Shape(
    gpt_of(48, 1600, 25, 1024),
    32,
    {
        "llm.c, 8 x H100, ZeRO-1, micro 16": 46_800,
        "planned here for one H100 before the first run": 38_500,
    },
)
LLAMA = Shape(
    llama_of(16, 2048, 32, 8, 8192, 128_256, tied=True),
    8,
    {"nanotron, 8 x H100": 42_000, "nanochat d26, 8 x H100": 78_750},
)
SEVEN_B = Shape(
    llama_of(32, 4096, 32, 32, 11_008, 32_000, tied=False),
    4,
    {
        "fms-fsdp, 96 x H100, compile": 9_600,
        "KempnerForge 8B, one H200, full recompute, compile, bf16 masters": 10_471,
        "torchtitan 8B, 8 x H100, eager / compile": 5_762,
    },
)
# Allowed relative difference of the last losses with two micro-batch sizes. bf16 rounds each activation by 2^-9, and
# sums over tokens have another order; in a mean over 32,768 tokens the errors cancel to less than 2^-10, the
# certificate's limit for a loss. Five updates multiply that by five.
ALLOWED = 5 * 2.0**-10
TOP = 15  # kernels shown of a profile
Span = tuple[str, float, float]  # a kernel's name, begin and end, in microseconds


def gpt(asked: Asked) -> Iterator[Row]:
    """Yield GPT-2 1.5B: ours, a profile of a step, recompute without and with CUDA graphs, then the others."""
    shape = GPT.of(asked)
    yield from ours(shape, asked, [1, 4, 8, *([16] if shape.sequences > 8 else [])])
    yield from profiled(shape, asked)
    full = {"recompute": "full"}
    yield from ours(shape, asked, [1], full, "recomputed, ")
    yield from ours(shape, asked, [1], full | {"cuda_graphs": True}, "recomputed, CUDA graphs, ")
    yield from _others(shape, asked, min(16, shape.sequences))


def llama(asked: Asked) -> Iterator[Row]:
    """Yield Llama 3.2 1B: ours, then the others."""
    shape = LLAMA.of(asked)
    yield from ours(shape, asked, [1, 4, 8])
    yield from _others(shape, asked, 4)


def whole(asked: Asked) -> Iterator[Row]:
    """Yield Llama 2 7B in the memory of one GPU: 18 bytes per parameter, or 16 with bf16 gradients."""
    yield from _published(SEVEN_B)
    shape = SEVEN_B.of(asked)
    yield from ours(shape, asked, [2], {"recompute": "full"}, "recompute full, ")
    yield from ours(shape, asked, [1], {"recompute": "selective"}, "recompute selective, bf16 gradients, ", "param")


def hosted(asked: Asked) -> Iterator[Row]:
    """Yield Llama 2 7B with masters, moments and update on the host: 16 bytes per parameter there, 108 GB in all."""
    how = {"stage": 1, "recompute": "full", "offload_optimizer": "cpu"}
    yield from ours(SEVEN_B.of(asked), asked, [4], how, "optimizer on the host, bf16 gradients, ", "param")


def variants(asked: Asked) -> Iterator[Row]:
    """Yield GPT-2 1.5B with fused kernels, with compiled ones, and with the loss in chunks."""
    shape, chunk = GPT.of(asked), 8 if asked.tiny else 2048
    for kernels in ("auto", "compile"):
        yield from ours(shape, asked, [8], name=f"kernels {kernels}, ", kernels=kernels)
    yield from ours(
        shape, asked, [8, *([16] if shape.sequences > 8 else [])], {"loss_chunk": chunk}, "loss in chunks, "
    )


def ours(
    shape: Shape,
    asked: Asked,
    micros: Sequence[int],
    how: Mapping[str, Any] = MappingProxyType({}),
    name: str = "",
    grad_dtype: str = "fp32",
    kernels: str = "auto",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Row]:
    """Yield the steps of ours with some micro-batch sizes.

    Args:
        how: fields of `Case.how`; the others are those of `Case`.
    """
    losses: list[float] = []
    for micro in micros:
        case = Case(name, {"micro_batch": micro, **how}, "bf16", kernels, grad_dtype, dict(options))
        ops = choose(case.kernels, asked.device, torch.bfloat16)
        make = partial(stepper, case, single(), asked, ops, shape)
        row = measured(f"ours, {name}micro-batch {micro}", make, asked, shape) | {"kernels": ops.name}
        yield agreed(row, losses)


def agreed(row: Row, losses: list[float]) -> Row:
    """Return a row with the relative difference of its loss from the first one; more than allowed is a fault."""
    if "loss" not in row or row.get("fault"):
        return row
    losses.append(row["loss"])
    apart = abs(losses[-1] - losses[0]) / abs(losses[0])
    fault = f"losses differ by {apart:.1e}, allowed {ALLOWED:.0e}" if apart > ALLOWED else None
    return row | {"loss_apart": apart, "fault": fault}


def _others(shape: Shape, asked: Asked, micro: int) -> Iterator[Row]:
    yield from _published(shape)
    with peers.alone(asked):
        for name, make in SYSTEMS.items():
            for size in (micro, micro // 2):  # half of it if that does not fit
                build = partial(make, shape, size, asked, compiled="compile" in name)
                row = measured(f"{name}, micro-batch {size}", build, asked, shape, ours=False)
                yield row
                if "absent" not in row:
                    break


SYSTEMS: dict[str, Callable[..., Step]] = {
    "plain torch": peers.plain,
    "plain torch, torch.compile": peers.plain,
    "FSDP2 of one rank": peers.fsdp2,
    "FSDP2 of one rank, torch.compile": peers.fsdp2,
}


def _published(shape: Shape) -> Iterator[Row]:
    for who, rate in shape.published.items():
        yield {"name": f"published: {who}", "tokens_per_s": float(rate)}


def profiled(shape: Shape, asked: Asked) -> Iterator[Row]:
    """Profile one step of ours; yield the share of time in which the device is idle, and the longest kernels."""
    try:
        yield from times_of(_spans(shape, asked))
    except Exception as error:  # no profiler, or no memory: go on with the other rows
        traceback.print_exc()
        yield {"name": "profile of a step", "absent": error_line(error)}
    free(asked)


def _spans(shape: Shape, asked: Asked) -> list[Span]:
    """Return the kernels of one step of ours, from a profile."""
    ops = choose("auto", asked.device, torch.bfloat16)
    step = stepper(Case("", {"micro_batch": 8}, "bf16", "auto"), single(), asked, ops, shape)
    for number in range(2):
        step(number)
    asked.synchronize()
    name = "CUDA" if asked.on_gpu else "CPU"
    with profile(activities=[getattr(ProfilerActivity, name)]) as found:
        step(2)
        asked.synchronize()
    events = [event for event in found.events() or [] if event.device_type.name == name and event.cpu_parent is None]
    return [(event.name, event.time_range.start, event.time_range.end) for event in events]


def times_of(spans: Sequence[Span]) -> Iterator[Row]:
    """Yield the rows of a profile."""
    first, last = min(begin for _, begin, _ in spans), max(end for *_, end in spans)
    busy, reached = 0.0, first
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    yield {"name": "profile of a step", "ms": (last - first) / 1e3, "idle": 1 - busy / (last - first)}
    sums: dict[str, tuple[float, int]] = {}
    for name, begin, end in spans:
        total, count = sums.get(name, (0.0, 0))
        sums[name] = total + end - begin, count + 1
    for name, (total, count) in sorted(sums.items(), key=lambda item: -item[1][0])[:TOP]:
        yield {"name": f"  {name[:100]}", "ms": total / 1e3, "share": total / (last - first), "launches": count}
