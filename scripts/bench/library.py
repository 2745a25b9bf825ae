"""Compare GPT-2 of transformers under `megazero.shard` with DDP, FSDP2 and DeepSpeed: speed and memory.

    python scripts/bench/library.py [--launches 3] [--pairs 21] [--only PATTERN ...] [--save]
    python scripts/bench/library.py --only 'ours-stage?' --before TREE
       each stage next to itself in another checkout

The model is the GPT-2 of 124M parameters, cut to 4 layers: hidden 768, 12 heads, vocabulary 50,257 tied, 128 tokens,
micro-batch 1; 67M parameters. Two ranks of one thread each, fp32, no dropout, fused AdamW, clip 1.0. The systems differ
only in how they shard the model. The reference (ratio 1.000) is two ranks of plain torch without communication, each of
which updates all parameters.

Ours uses memory that the ranks of a host share, and the peers gloo's sockets over the loopback; zero.py compares both.
Systems run in groups, because not all fit into memory together; each group has its own reference.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

import torch
import transformers
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import megazero
from megazero.library import meeting
from scripts.bench import data_parallel as peers
from scripts.bench.data_parallel import Work
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.other_tree import add_before, with_before
from scripts.bench.ours import BETAS, CLIP, DECAY, EPS, LR, SHARED, SOCKETS, comm_of
from scripts.bench.processes import Call, System
from scripts.bench.zero import STAGES, Stage, cut, plain

RANKS, TOGETHER = 2, 3
TOKENS = 128
GPT2: dict[str, Any] = {"n_layer": 4, "n_positions": TOKENS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_before(parser)
    add_options(parser)
    options = parser.parse_args()
    return run(groups_of(options.only, options.before), options)


def gpt2() -> nn.Module:
    """Return the GPT-2 with its initial weights."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)  # transformers draws from the global generator
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def token_batches(rank: int) -> Iterator[Tensor]:
    """Yield endless token ids [1, S]."""
    draw = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(0, 50257, (1, TOKENS), generator=draw)


def token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of next tokens."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies to a parameter."""
    return parameter.dim() >= 2


WORK = Work(gpt2, (GPT2Block,), token_loss, token_batches, decays, micro=1, accumulation=1, hidden=768)


def groups_of(only: list[str], before: str | None) -> Iterator[Group]:
    """Yield the groups of systems."""
    asked = chosen([plain(WORK), *systems_of()], only)
    return cut("gpt2", with_before(asked, before, "library", ()), TOGETHER)


def systems_of() -> list[System]:
    """Return all systems but the reference."""
    systems = [System(f"ours-stage{stage}", our_rank, (WORK, stage), ranks=RANKS, transport=SHARED) for stage in STAGES]
    rest: list[tuple[str, Callable[..., Call], tuple]] = [
        ("ddp", peers.ddp_rank, ()),
        ("fsdp2-reshard", peers.fsdp2_rank, (True,)),
        *((f"deepspeed-stage{stage}", peers.deepspeed_rank, (stage,)) for stage in (1, 2, 3)),
    ]
    return systems + [
        System(name, build, (WORK, *extra), ranks=RANKS, transport=SOCKETS) for name, build, extra in rest
    ]


def our_rank(work: Work, stage: Stage, rank: int, size: int, store: str) -> Call:
    """Return a step under `megazero.shard` on one rank."""
    place, comm = comm_of(rank, size, store)
    meeting.be(place, comm)
    model = work.make()
    names = [name for name, parameter in model.named_parameters() if not work.decays(name, parameter)]
    options = {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    groups = [(name, {"weight_decay": 0.0}) for name in names]
    sharded = megazero.shard(model, options, stage=stage, clip=CLIP, units=work.blocks, groups=groups)
    batches, compute = work.batches(rank), partial(work.loss, sharded)

    def step() -> float:
        loss = compute(next(batches))
        sharded.backward(loss)
        sharded.step()
        return loss.item()

    return step


if __name__ == "__main__":
    sys.exit(main())
