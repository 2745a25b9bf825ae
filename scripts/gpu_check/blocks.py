"""Time our blocks and our cross entropy beside plain torch, torch.compile and Liger's kernel, forward and backward.

Blocks: a GPT of a few blocks with a small vocabulary, in bf16, of 1.3B's sizes. Ours adds gradients to a buffer in
fp32, as a run does; the others leave them in bf16. Cross entropy: 4,096 rows of logits in bf16, of two vocabularies.
Ours and Liger's write the gradient over the logits, so all systems get a fresh copy of them in each call; `copy` is the
time of that alone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.build.assemble import assemble, feeds_of
from megazero.comm.grid import Axis, single
from megazero.comm.host import Host
from megazero.data.windows import MicroBatch
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose
from megazero.model.loss import token_losses
from scripts.bench.plain_gpt import Block
from scripts.gpu_check.findings import Asked, Row
from scripts.gpu_check.kernels import missing
from scripts.gpu_check.layouts import Case, config_of
from scripts.gpu_check.speed import fill, model_of
from scripts.gpu_check.timing import medians

BLOCKS, VOCAB, MICRO_BATCH = 4, 1024, 4
ROWS, VOCABULARIES = 4096, (50_304, 131_072)
Call = Callable[[], object]


def rows(asked: Asked) -> Iterator[Row]:
    """Yield the blocks, then cross entropy."""
    absent = missing(asked.device)
    if absent is not None:
        yield absent
    kernels = ["fused", "reference"] if absent is None else ["reference"]
    ours = {each: choose(each, asked.device, torch.bfloat16) for each in kernels}
    compiles = asked.on_gpu
    if not compiles:
        yield {"name": "torch.compile", "absent": "its compiler is for GPUs here"}
    systems = {f"blocks, ours, {name}": _late(partial(_our_blocks, asked, ops)) for name, ops in ours.items()}
    systems["blocks, plain"] = _late(partial(_plain_blocks, asked, compiled=False))
    if compiles:
        systems["blocks, plain, compiled"] = _late(partial(_plain_blocks, asked, compiled=True))
    yield from _beside(systems, asked, BLOCKS)
    for vocab in (64,) if asked.tiny else VOCABULARIES:
        yield from _beside(_losses(vocab, asked, ours, compiles), asked, 1)
    if _liger() is None:
        yield {"name": "Liger's cross entropy", "absent": "liger-kernel is not installed"}


def _beside(systems: dict[str, Call], asked: Asked, parts: int) -> Iterator[Row]:
    """Yield microseconds of a part of each system, and how many times as long as the first it takes."""
    found = medians(list(systems.values()), asked.device)
    first = found[0]
    for name, seconds in zip(systems, found, strict=True):
        if isinstance(seconds, str):  # whose fault is it? ours count
            yield {"name": name, "fault" if "ours" in name else "absent": seconds}
        else:
            row: Row = {"name": name, "us": 1e6 * seconds / parts}
            yield row | ({"times_first": seconds / first} if isinstance(first, float) else {})


def _late(build: Callable[[], Call]) -> Call:
    """Return a call that is built when it is first made: what breaks then is a row."""
    built: list[Call] = []

    def call() -> object:
        if not built:
            built.append(build())
        return built[0]()

    return call


def _our_blocks(asked: Asked, ops: Operations) -> Call:
    model = model_of(asked) | {"layers": BLOCKS, "vocab": VOCAB}
    grid, device = single(), asked.device
    case = Case("blocks", {"micro_batch": MICRO_BATCH}, dtype="bf16")
    config = config_of(case, model, MICRO_BATCH)
    built = assemble(config, grid, device, ops, Host(device, grid.comm.ledger), None)
    fill(built.engine, seed=0)
    tokens_SB = torch.zeros(model["seq_len"], MICRO_BATCH, dtype=torch.int64, device=device)
    valid_SB, ids = torch.ones_like(tokens_SB, dtype=torch.bool), torch.zeros_like(tokens_SB[0])
    batch, feed = MicroBatch(tokens_SB, tokens_SB, valid_SB, None, None, ids), feeds_of(grid["tensor"], device, False)

    def step() -> None:
        built.engine.begin_step()
        built.pipeline.train([batch], lambda each: feed(each, 0, True))

    return step


def _plain_blocks(asked: Asked, *, compiled: bool) -> Call:
    model = model_of(asked)
    blocks = [Block(model["hidden"], model["heads"]).to(asked.device, torch.bfloat16) for _ in range(BLOCKS)]
    called: list[Callable[[Tensor], Tensor]] = [torch.compile(block) if compiled else block for block in blocks]
    embedding = nn.Embedding(VOCAB, model["hidden"], device=asked.device, dtype=torch.bfloat16)
    tokens = torch.zeros(MICRO_BATCH, model["seq_len"], dtype=torch.int64, device=asked.device)

    def step() -> None:
        for module in (*blocks, embedding):
            module.zero_grad(set_to_none=True)
        x = embedding(tokens)
        for block in called:
            x = block(x)
        F.cross_entropy(F.linear(x, embedding.weight).flatten(0, 1), tokens.flatten()).backward()

    return step


def _losses(vocab: int, asked: Asked, ours: dict[str, Operations], compiles: bool) -> dict[str, Call]:
    """Return the calls of each system on logits of its own copy: [N, V]."""
    generator = torch.Generator(asked.device).manual_seed(0)
    count, device = 64 if asked.tiny else ROWS, asked.device
    source = torch.randn(count, vocab, generator=generator, device=device).to(torch.bfloat16)
    targets = torch.randint(0, vocab, (count,), generator=generator, device=device)
    logits = torch.empty_like(source)
    valid, tensor = torch.ones_like(targets, dtype=torch.bool)[:, None], Axis("tensor")

    def of(loss: Callable[[Tensor], Tensor]) -> Call:
        def call() -> None:
            logits.copy_(source)
            x = logits.detach().requires_grad_()
            torch.autograd.grad(loss(x.view_as(x)).sum(), x)

        return call

    def our_loss(ops: Operations) -> Callable[[Tensor], Tensor]:
        return lambda x: token_losses(x[:, None], targets[:, None], valid, vocab=vocab, tensor=tensor, ops=ops)

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), targets, reduction="none")

    systems: dict[str, Call] = {f"loss, {vocab}, ours, {name}": of(our_loss(ops)) for name, ops in ours.items()}
    systems[f"loss, {vocab}, plain"] = of(plain)
    if compiles:
        systems[f"loss, {vocab}, compiled"] = of(torch.compile(plain))
    if (liger := _liger()) is not None:
        systems[f"loss, {vocab}, Liger"] = of(lambda x: liger(x, targets))
    systems[f"loss, {vocab}, copy"] = lambda: logits.copy_(source)
    return systems


def _liger() -> Callable[..., Any] | None:
    """Return Liger's cross entropy, a mean over rows; None: it is not installed."""
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss  # type: ignore[import-not-found]
    except ImportError:
        return None
    return LigerCrossEntropyLoss()
