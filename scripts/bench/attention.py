"""Training steps with the documents of a window kept apart (`data.mask_eod`) beside steps without.

    python scripts/bench/attention.py [--seq-len 4096] [--launches 3] [--pairs 21] [--json] [--save]

2 layers, hidden 512, 8 heads, vocabulary 1,024 tied, one sequence of 4,096 tokens a step, fp32, one process, two
threads. The reference (ratio 1.000) is the step without documents: plain causal attention over the whole window. Beside
it windows of 16 equal documents, of 16 of different lengths (17 to 512 tokens, and the rest), and of 1,024 documents of
four tokens; and what a mask costs, which is how documents were kept apart before: the same 16 documents by one mask
[S, S] that every layer is given. *rotary* is the same with rotary positions, RMSNorm, SwiGLU and grouped queries.

Not measured on a GPU, where documents take torch's variable-length attention.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from megazero.builders.assemble import build, feeds_of
from megazero.comm.grid import single
from megazero.config.schema import Batch, Config, Model, resolved
from megazero.data.batch import MicroBatch
from megazero.kernels.select import choose
from megazero.model.attention import Attention
from megazero.model.batch_context import BatchContext
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.ours import CPU, LR
from scripts.bench.processes import Call, System

VOCAB, THREADS, NUMBER, TINY = 1024, 2, 16, 4
SHAPE = {"layers": 2, "hidden": 512, "heads": 8, "vocab": VOCAB}
MODELS = {
    "GPT": SHAPE,
    "rotary": SHAPE
    | {"kv_heads": 2, "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": False},
}
WINDOWS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "16 equal documents": lambda length: (length // NUMBER,) * NUMBER,
    "16 documents of different lengths": lambda length: uneven(length),
    "documents of four tokens": lambda length: (TINY,) * (length // TINY),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a window (default: %(default)s)")
    add_options(parser)
    options = parser.parse_args()
    return run(groups_of(options.seq_len, options.only), options)


def groups_of(length: int, only: list[str]) -> Iterator[Group]:
    for model in MODELS:
        first, cases = next(iter(WINDOWS)), {"one document": None} | {name: name for name in WINDOWS}
        systems = [System(name, our_step, (model, length, window), THREADS) for name, window in cases.items()]
        systems.append(System(f"{first}, by a mask", our_step, (model, length, first, True), THREADS))
        systems = [replace(system, has_loss=False) for system in systems]
        yield Group(f"documents, {model}, {length:,} tokens", chosen(systems, only))


def uneven(length: int) -> tuple[int, ...]:
    """Return 16 different lengths that add up to `length`."""
    step = 2 * length // (NUMBER * (NUMBER + 1))
    lengths = [step * number for number in range(1, NUMBER)]
    return (*lengths, length - sum(lengths))


def our_step(model: str, length: int, window: str | None, by_mask: bool = False) -> Call:
    """Return one training step of the engine; it returns the step's loss.

    Args:
        window: the documents of every sequence; None: each is one.
        by_mask: attention gets a mask of all pairs of tokens.
    """
    config = config_of(model, length)
    built = build(config, single(), CPU, choose("auto", CPU, torch.float32))
    if by_mask:
        for layer in built.model.modules():
            if isinstance(layer, Attention):
                layer.core = masked(layer)
    feed = feeds_of(single()["tensor"], CPU, False)
    lengths = None if window is None else WINDOWS[window](length)
    positions = None if lengths is None else torch.cat([torch.arange(n) for n in lengths])[:, None]
    generator, steps = torch.Generator().manual_seed(0), iter(range(1 << 30))

    def step() -> float:
        tokens = torch.randint(0, VOCAB, (length + 1, 1), generator=generator)
        valid = torch.ones(length, 1, dtype=torch.bool)
        documents = None if lengths is None else (lengths,)
        batch = MicroBatch(tokens[:-1].clone(), tokens[1:].clone(), valid, positions, documents, torch.zeros(1).long())
        now = next(steps)
        built.engine.begin_step()
        built.pipeline.train([batch], lambda batch: feed(batch, now, True))
        return built.engine.finish_step(LR).loss.item()

    return step


def config_of(model: str, length: int) -> Config:
    shape = Model(**MODELS[model], seq_len=length)
    return resolved(Config(model=shape, batch=Batch(**{"global": 1, "micro": 1})))


def masked(attention: Attention) -> Callable[[Tensor, BatchContext], Tensor]:
    """Return attention's core with a mask of all pairs of tokens, made once a micro-batch."""
    made: list[tuple[BatchContext, Tensor]] = []

    def core(qkv: Tensor, step: BatchContext) -> Tensor:
        if not made or made[0][0].documents is not step.documents:
            made[:] = [(replace(step), mask_of(step))]
        q, k, v = (x.permute(1, 2, 0, 3) for x in attention._heads(qkv, step.positions_SB))
        grouped = q.shape[1] != k.shape[1]
        a_BHSd = F.scaled_dot_product_attention(q, k, v, attn_mask=made[0][1], enable_gqa=grouped)
        return rearrange(a_BHSd, "b h s d -> s b (h d)")

    return core


def mask_of(step: BatchContext) -> Tensor:
    """Return True where a query (row) may see a key (column): [B, 1, S, S]."""
    assert step.documents is not None
    numbers = [torch.repeat_interleave(torch.arange(len(of)), torch.tensor(of)) for of in step.documents.lengths]
    documents_BS = torch.stack(numbers)
    return (documents_BS[:, :, None] == documents_BS[:, None, :]).tril_()[:, None]


if __name__ == "__main__":
    sys.exit(main())
