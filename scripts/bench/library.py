"""Compare models of transformers under `megazero.shard` with DDP, FSDP1, FSDP2 and DeepSpeed: speed and memory.

    python scripts/bench/library.py [--model gpt2 vit] [--launches 3] [--pairs 21] [--only PATTERN ...] [--save]
    python scripts/bench/library.py --only 'ours-stage?' --before TREE
       each stage next to itself in another checkout, whose `systems_of` takes the name of a model too

    gpt2    transformers' GPT-2 of 124M parameters, cut to 4 layers: hidden 768, 12 heads, vocabulary 50,257 tied, 128
            tokens, micro-batch 1                                                                    67M parameters
    vit     transformers' ViT-B/16 cut to 6 layers: hidden 768, 12 heads, 224 x 224, micro-batch 2    43M parameters

Two ranks of one thread each, fp32, no dropout, fused AdamW, clip 1.0. All systems train the model of transformers; they
differ only in how it is sharded. The reference (ratio 1.000) is two ranks of plain torch without communication, each of
which updates all parameters.

Transport: `ours-stageN` uses memory that the ranks of a host share; `ours-stageN-sockets` uses gloo's sockets over the
loopback, as all peers do. Systems run in groups, because not all fit into memory together; each group has its own
reference.
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
from transformers.models.vit.modeling_vit import ViTLayer

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
VIT: dict[str, Any] = {"num_hidden_layers": 6, "num_labels": 1000}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKS, nargs="+", default=list(WORKS))
    add_before(parser)
    add_options(parser)
    options = parser.parse_args()
    groups = (group for model in options.model for group in groups_of(model, options.only, options.before))
    return run(groups, options)


def gpt2() -> nn.Module:
    """Return the GPT-2 with its initial weights."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)  # transformers draws from the global generator
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def vit() -> nn.Module:
    """Return the ViT with its initial weights."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)  # transformers draws from the global generator
        return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))


def token_batches(rank: int) -> Iterator[Tensor]:
    """Yield endless token ids [1, S]."""
    draw = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(0, 50257, (1, TOKENS), generator=draw)


def image_batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless images [2, 3, H, W] with labels [2]."""
    draw = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(2, 3, 224, 224, generator=draw), torch.randint(0, 1000, (2,), generator=draw)


def token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of next tokens."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def image_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of (images, labels)."""
    return model(pixel_values=batch[0], labels=batch[1]).loss


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies to a parameter."""
    return parameter.dim() >= 2


WORKS = {
    "gpt2": Work(gpt2, (GPT2Block,), token_loss, token_batches, decays, micro=1, accumulation=1, hidden=768),
    "vit": Work(vit, (ViTLayer,), image_loss, image_batches, decays, micro=2, accumulation=1, hidden=768),
}


def groups_of(model: str, only: list[str], before: str | None) -> Iterator[Group]:
    """Yield the groups of systems of a model."""
    asked = chosen([plain(WORKS[model]), *systems_of(model)], only)
    return cut(model, with_before(asked, before, "library", (model,)), TOGETHER)


def systems_of(model: str) -> list[System]:
    """Return all systems but the reference."""
    work = WORKS[model]
    systems = [
        System(f"ours-stage{stage}{suffix}", our_rank, (work, stage, transport), ranks=RANKS, transport=transport)
        for suffix, transport in (("", SHARED), ("-sockets", SOCKETS))
        for stage in STAGES
    ]
    rest: list[tuple[str, Callable[..., Call], tuple]] = [
        ("ddp", peers.ddp_rank, (False,)),
        ("fsdp1-full-shard", peers.fsdp1_rank, ("FULL_SHARD",)),
        ("fsdp2-no-reshard", peers.fsdp2_rank, (False,)),
        ("fsdp2-reshard", peers.fsdp2_rank, (True,)),
        *((f"deepspeed-stage{stage}", peers.deepspeed_rank, (stage,)) for stage in (1, 2, 3)),
    ]
    return systems + [
        System(name, build, (work, *extra), ranks=RANKS, transport=SOCKETS) for name, build, extra in rest
    ]


def our_rank(work: Work, stage: Stage, transport: str, rank: int, size: int, store: str) -> Call:
    """Return a step under `megazero.shard` on one rank."""
    place, comm = comm_of(rank, size, store, transport=transport)
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
