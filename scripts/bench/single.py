"""Compare training speed in one process with the same model in plain torch.

    python scripts/bench/single.py [--model small wide head] [--threads 1 2] [--launches 3] [--pairs 21] [--save]
    python scripts/bench/single.py --only ours --before TREE    ours next to itself in another checkout

    small   8 layers, hidden 512, 8 heads, vocabulary 8,192 tied, sequence 256, micro-batch 2      29.5M parameters
    wide    9 layers, hidden 1,024, 16 heads, the same vocabulary and sequence, micro-batch 1     122.0M
    head    2 layers, hidden 512, 8 heads, vocabulary 50,257 tied, sequence 256, micro-batch 8     32.2M
    llama3  small with 2 key-value heads, rotary, RMSNorm, SwiGLU of 1,792, untied, no biases      35.7M
    qwen3   llama3 with heads of 128 that are normed, SwiGLU of 1,536, tied                        33.6M

fp32, no dropout, AdamW fused, clip 1.0; all start from the same weights and see the same tokens. The reference (ratio
1.000) is plain torch. `plain torch, compiled` has torch.compile around each block, as torchtitan advises, and in `head`
around the whole model, so that it covers the loss; `ours, reference kernels` and `ours, compiled kernels` use the
operations' specification instead of our kernels, the latter through torch.compile. `head` also has our loss in chunks
of 256 tokens. There is no communication.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

from torch import nn

from megazero.comm.grid import single
from megazero.config.schema import Batch, Config, Model, resolved
from scripts.bench import data_parallel as peers
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.other_tree import add_before, pairs_of, with_before
from scripts.bench.ours import SEQ_LEN, VOCAB, engine_step
from scripts.bench.processes import Call, System

SMALL = {"layers": 8, "hidden": 512, "heads": 8, "vocab": VOCAB, "seq_len": SEQ_LEN}
LLAMA = SMALL | {"kv_heads": 2, "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "rope_theta": 5e5}
SIZES: dict[str, tuple[dict[str, Any], int]] = {  # options of the model, and samples of a micro-batch
    "small": (SMALL, 2),
    "wide": (SMALL | {"layers": 9, "hidden": 1024, "heads": 16}, 1),
    "head": (SMALL | {"layers": 2, "vocab": 50_257}, 8),
    "llama3": (LLAMA | {"ffn": 1792, "tie_embeddings": False}, 2),
    "qwen3": (LLAMA | {"ffn": 1536, "tie_embeddings": True, "head_dim": 128, "qk_norm": "head"}, 2),
}
CHUNK = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, nargs="+", default=["small", "wide"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    add_before(parser)
    add_options(parser)
    options = parser.parse_args()
    groups = (group_of(model, threads, options) for model in options.model for threads in options.threads)
    return run(groups, options)


def group_of(model: str, threads: int, options: argparse.Namespace) -> Group:
    """Return the group of a model with some threads per process."""
    asked = chosen(systems_of(model, threads), options.only)
    systems = with_before(asked, options.before, "single", (model, threads))
    return Group(f"{model}, {threads} thread{'s' * (threads > 1)}", systems, pairs=pairs_of)


def systems_of(model: str, threads: int) -> list[System]:
    """Return all systems; the reference is the first."""
    systems = [
        System("plain torch", plain_step, (model, False), threads),
        System("plain torch, compiled", plain_step, (model, True), threads),
        System("ours", our_step, (model, "auto", 0), threads),
        System("ours, reference kernels", our_step, (model, "reference", 0), threads),
        System("ours, compiled kernels", our_step, (model, "compile", 0), threads),
    ]
    if model == "head":
        systems[-2:] = [System("ours, loss in chunks", our_step, (model, "auto", CHUNK), threads)]
    return systems


def config_of(model: str, chunk: int = 0) -> Config:
    """Return the config of a model by its name in `SIZES`."""
    options, micro = SIZES[model]
    shape = Model(**options, loss_chunk=chunk)
    return resolved(Config(model=shape, batch=Batch(**{"global": micro, "micro": micro})))


def our_step(model: str, kernels: str, chunk: int) -> Call:
    """Return a training step of the engine."""
    return engine_step(config_of(model, chunk), single(), kernels)


def plain_step(model: str, compiled: bool) -> Call:
    """Return a training step of plain torch, with the same initial weights and tokens."""
    work = peers.gpt(config_of(model), ranks=1)
    make = partial(_compiled, work, whole=model == "head")
    return peers.plain_rank(replace(work, make=make) if compiled else work, 0, 1, "")


def _compiled(work: peers.Work, whole: bool) -> nn.Module:
    """Return the model with torch.compile around it as a whole, or around each block."""
    plain = work.make()
    for part in [plain] if whole else plain.modules():
        if whole or isinstance(part, work.blocks):
            part.compile()
    return plain


if __name__ == "__main__":
    sys.exit(main())
