"""Measure steps of whole models in bf16; ours are those of a run, so the host does not wait for them.

Tokens are random. The sequences of a step, the warm-up, AdamW with clipping, and the timing are the same for all
systems. MFU follows the planner's formula (`plan/model.py`): model FLOPs of PaLM, appendix B, over the chip's dense
peak, which is not known for CPUs. Recomputation does not count.
"""

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megazero.builders.assemble import build, feeds_of
from megazero.builders.pipeline import model_shape
from megazero.builders.upload import Upload
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.data.batch import MicroBatch
from megazero.kernels.operations import Operations
from megazero.kernels.select import for_host
from megazero.plan.flops import flops_per_token
from megazero.plan.hardware import peak_flops
from megazero.run.attention import settle_attention
from megazero.zero.engine import Engine
from scripts.gpu_check.findings import Asked, Row, error_line
from scripts.gpu_check.layouts import MODEL, Case, config_of

WARM_UP, STEPS, LR = 2, 3, 3e-4
Step = Callable[[int], Tensor]  # trains a step, returns its mean loss as a tensor on the device


@dataclass(frozen=True)
class Shape:
    """A model, and the sequences per step on each data rank.

    Attributes:
        published: tokens/s/GPU that others have published, by system and setup.
    """

    model: dict[str, Any]
    sequences: int
    published: dict[str, float] = field(default_factory=dict)

    def of(self, asked: Asked) -> "Shape":
        """Return the shape for a request; with `tiny` it has two layers of 64 channels."""
        if not asked.tiny:
            return self
        heads = {"heads": 4, "kv_heads": 2 if self.model["kv_heads"] < self.model["heads"] else 4}
        small = {"layers": 2, "hidden": 64, "ffn": 256, "vocab": 251, "seq_len": 32} | heads
        return Shape(self.model | small, 8, self.published)


def gpt(layers: int, hidden: int, heads: int, seq_len: int) -> dict[str, Any]:
    """Return a GPT without dropout, with a vocabulary padded to a multiple of 128, as in llm.c."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": 4 * hidden}
    return MODEL | sizes | {"vocab": 50_304, "seq_len": seq_len, "dropout": 0.0}


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, tied: bool) -> dict[str, Any]:
    """Return a Llama with sequences of 4,096 tokens."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    kind = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": tied}
    return MODEL | sizes | kind | {"seq_len": 4096, "dropout": 0.0, "rope_theta": 500_000.0}


GPT_1_3B = Shape(gpt(24, 2048, 16, 2048), 8)


def measured(name: str, make: Callable[[], Step], asked: Asked, shape: Shape, *, ours: bool = True) -> Row:
    """Measure the steps of a system; return their row, or one that says why it failed.

    Args:
        make: builds the system.
        ours: whether an error in it is a fault.
    """
    try:
        return {"name": name} | _measured(make, asked, shape)
    except torch.OutOfMemoryError:
        return {"name": name, "absent": "does not fit into the memory"}
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "fault" if ours else "absent": error_line(error)}
    finally:
        free(asked)


def free(asked: Asked) -> None:
    """Free the memory of a system after its last use."""
    gc.collect()  # an engine's units and the views of their gradients are in a reference cycle
    if asked.on_gpu:
        torch.cuda.empty_cache()


def _measured(make: Callable[[], Step], asked: Asked, shape: Shape) -> Row:
    if asked.on_gpu:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(asked.device)
    began = time.perf_counter()
    step = make()
    for number in range(WARM_UP):
        step(number)
    asked.synchronize()
    begin = time.perf_counter()
    losses = [step(WARM_UP + number) for number in range(STEPS)]
    host_s = (time.perf_counter() - begin) / STEPS
    asked.synchronize()
    step_s = (time.perf_counter() - begin) / STEPS
    loss = losses[-1].item()
    rate = shape.sequences * shape.model["seq_len"] / step_s  # per device
    flops = rate * flops_per_token(model_shape(config_of(Case(""), shape.model)))
    row: Row = {"tokens_per_s": rate, "step_s": step_s, "host_s": host_s, "tflops": flops / 1e12}
    if asked.on_gpu:
        most = peak_flops(torch.cuda.get_device_name(asked.device), "bf16")
        row["mfu"] = None if most is None else flops / most
        row["peak_gib"] = torch.cuda.max_memory_allocated(asked.device) / 2**30
    row |= {"loss": loss, "start_s": begin - began}
    return row if math.isfinite(loss) else row | {"fault": "the loss is not finite"}


def windows(shape: Shape, seed: int = 0) -> Iterator[Tensor]:
    """Yield the tokens of each step, with one more token per sequence: [S + 1, sequences]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        size = shape.model["seq_len"] + 1, shape.sequences
        yield torch.randint(0, shape.model["vocab"], size, generator=generator)


def stepper(case: Case, grid: Grid, asked: Asked, ops: Operations, shape: Shape) -> Step:
    """Return a function that trains a step of our system."""
    data, device = grid["data"], asked.device
    config = config_of(case, shape.model, shape.sequences * data.size)
    host = Host(device, grid.comm.ledger, apart=True)
    # filled=False: initial values would take the host a minute.
    built = build(config, grid, device, ops, host, host_ops=for_host(case.kernels, torch.float32), filled=False)
    settle_attention(config, built.model, device, first=True)
    fill(built.engine, device, seed=data.rank)
    feed, upload, tokens = feeds_of(grid["tensor"], device, False), Upload(device), windows(shape, data.rank)

    def step(number: int) -> Tensor:
        batches = [_micro_batch(part) for part in next(tokens).split(case.job.micro_batch, dim=1)]
        batches = upload.pack(batches)() if asked.on_gpu else batches
        built.engine.begin_step()
        built.pipeline.train(batches, lambda each: feed(each, number, True))
        return built.engine.finish_step(LR).loss

    return step


def fill(engine: Engine, device: torch.device, seed: int) -> None:
    """Set masters to random numbers of the model's scale, and norm weights to 1; write them to the parameters."""
    generator = torch.Generator(device).manual_seed(seed)
    for unit in engine.units:
        masters = unit.masters
        for interval in unit.layout.intervals:
            part = masters[max(interval.start - unit.shard.start, 0) : max(interval.stop - unit.shard.start, 0)]
            if interval.name.endswith("norm.weight"):
                part.fill_(1.0)
            else:  # drawn on the device even for masters on the host, where one thread takes a minute
                part.copy_(torch.randn(len(part), generator=generator, device=device).mul_(0.02))
        unit.resting.round_masters()
        engine.gather.publish(unit)


def _micro_batch(window: Tensor) -> MicroBatch:
    tokens_SB, targets_SB = window[:-1].clone(), window[1:].clone()
    valid_SB = torch.ones_like(tokens_SB, dtype=torch.bool)
    return MicroBatch(tokens_SB, targets_SB, valid_SB, None, None, torch.arange(window.shape[1]))
