"""Build the systems that zero.py and library.py compare with ours.

They are plain torch without communication, DDP, ZeroRedundancyOptimizer, FSDP1, FSDP2, and DeepSpeed.

All do the same `Work`: the same model with the same initial weights (`gpt`: `plain_gpt.PlainGPT` with our weights),
fused AdamW, the same weight decay of the same parameters, and the same limit of the global gradient norm. Each is set
up as its own documentation advises; nothing is slowed down on purpose.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from megazero.config.schema import Config
from scripts.bench.ours import BETAS, CLIP, DECAY, EPS, LR, initial_weights, meet, random_batches
from scripts.bench.plain_gpt import Block, PlainGPT
from scripts.bench.plain_llama import PlainLlama, RotaryBlock

Step = Callable[[], float]
ADAM = {"lr": LR, "betas": BETAS, "eps": EPS, "fused": True}


@dataclass(frozen=True)
class Work:
    """The task that all systems train.

    Attributes:
        make: makes the model with its initial weights.
        blocks: the classes of its repeated blocks.
        loss: (model, micro-batch) -> its mean loss.
        batches: rank -> endless micro-batches of that rank.
        decays: (name, parameter) -> whether weight decay applies.
        micro: samples of a micro-batch.
        accumulation: micro-batches of a step on each rank.
        hidden: the width, from which DeepSpeed's limits follow.
    """

    make: Callable[[], nn.Module]
    blocks: tuple[type[nn.Module], ...]
    loss: Callable[[Any, Any], Tensor]
    batches: Callable[[int], Iterator[Any]]
    decays: Callable[[str, nn.Parameter], bool]
    micro: int
    accumulation: int
    hidden: int


def gpt(config: Config, ranks: int) -> Work:
    """Return the work of a model of plain torch modules in the shape of a config."""
    micro = config.batch.rows
    accumulation = config.batch.global_ // (micro * ranks)
    batches = partial(random_batches, micro, vocab=config.model.vocab, seq_len=config.model.seq_len)
    blocks = (Block, RotaryBlock)
    return Work(partial(peer, config), blocks, _loss, batches, _decays, micro, accumulation, config.model.hidden)


def peer(config: Config) -> PlainGPT | PlainLlama:
    """Return the unsharded model with the initial weights of ours."""
    m = config.model
    llama = m.position == "rotary"
    model = PlainLlama(m) if llama else PlainGPT(m.layers, m.hidden, m.heads, m.vocab, m.seq_len)
    model.take_weights(initial_weights(config))
    return model


def _loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens_SB, targets_SB = batch
    return model(tokens_SB.T, targets_SB.T)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "positions" not in name


def groups(named: Iterable[tuple[str, nn.Parameter]], decays: set[str]) -> list[dict]:
    """Return the parameter groups for torch's AdamW; `decays`: names of the parameters that decay."""
    named = list(named)
    return [
        {"params": [p for n, p in named if (n in decays) == decay], "weight_decay": DECAY if decay else 0.0}
        for decay in (True, False)
    ]


def decaying(work: Work, model: nn.Module) -> set[str]:
    """Return the names of the parameters that decay."""
    return {n for n, p in model.named_parameters() if work.decays(n, p)}


def torch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Work,
    rank: int,
    clip: Callable[[], object],
    quiet: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Step:
    """Return a step in plain torch style; `quiet` wraps every micro-batch but the last (`no_sync`)."""
    batches = work.batches(rank)

    def step() -> float:
        total = 0.0
        for number in range(work.accumulation):
            with quiet() if number < work.accumulation - 1 else contextlib.nullcontext():
                loss = work.loss(model, next(batches)) / work.accumulation
                loss.backward()
            total += loss.item()
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def clip_of(model: nn.Module) -> Callable[[], object]:
    """Return a call that clips the gradient norm of a model."""
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def plain_rank(work: Work, rank: int, size: int, store: str) -> Step:
    """Return a step without communication: each rank updates all of its own model."""
    model = work.make()
    optimizer = torch.optim.AdamW(groups(model.named_parameters(), decaying(work, model)), **ADAM)
    return torch_step(model, optimizer, work, rank, clip_of(model))


def ddp_rank(work: Work, rank: int, size: int, store: str) -> Step:
    """Return a step of DDP."""
    meet(rank, size, store)
    model = work.make()
    optimizer = torch.optim.AdamW(groups(model.named_parameters(), decaying(work, model)), **ADAM)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_step(wrapped, optimizer, work, rank, clip_of(model), wrapped.no_sync)


def zero_redundancy_rank(work: Work, rank: int, size: int, store: str) -> Step:
    """Return a step of DDP with ZeroRedundancyOptimizer."""
    meet(rank, size, store)
    model = work.make()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = groups(model.named_parameters(), decaying(work, model))
    optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **ADAM)
    return torch_step(wrapped, optimizer, work, rank, clip_of(model), wrapped.no_sync)


def fsdp2_rank(work: Work, reshard: bool, rank: int, size: int, store: str) -> Step:
    """Return a step of FSDP2; `reshard`: whether blocks are resharded after forward (the root is not, by default)."""
    meet(rank, size, store)
    model = work.make()
    decays = decaying(work, model)
    mesh = init_device_mesh("cpu", (size,))
    for block in [one for one in model.modules() if isinstance(one, work.blocks)]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    root = fully_shard(model, mesh=mesh)

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        yield
        root.set_requires_gradient_sync(True)

    optimizer = torch.optim.AdamW(groups(model.named_parameters(), decays), **ADAM)
    return torch_step(model, optimizer, work, rank, clip_of(model), quiet)


def join_deepspeed(rank: int, size: int, store: str) -> Any:
    """Join the other ranks; return the deepspeed module, imported only here because its import prints text."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.dup2(2, 1)  # DeepSpeed prints to stdout, where the parent writes a table or JSON
    meet(rank, size, store)
    import deepspeed  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def limits_of(hidden: int) -> dict[str, int]:
    """Return DeepSpeed's limits, in elements, for a model of this size.

    Its defaults (buckets of 5e8, 1e9 live parameters) are for models of billions of parameters. A model of this size
    would never reach them, so nothing would be released or sent before the end. Here a bucket holds one block, two
    blocks are live, and parameters of up to ten times the hidden size stay (its documentation's rule for "auto").
    """
    block = 12 * hidden * hidden
    return {
        "reduce_bucket_size": block,
        "allgather_bucket_size": block,
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 2 * block,
        "stage3_param_persistence_threshold": 10 * hidden,
    }


def deepspeed_rank(work: Work, stage: int, rank: int, size: int, store: str) -> Step:
    """Return a step of DeepSpeed.

    Overlap of communication is off: it needs a second stream, which DeepSpeed's CPU accelerator does not have. Only its
    inference engine uses its shared-memory collectives, so training goes through gloo's sockets.
    """
    deepspeed, model = join_deepspeed(rank, size, store), work.make()
    optimizer = torch.optim.AdamW(groups(model.named_parameters(), decaying(work, model)), **ADAM)
    settings = {
        "train_micro_batch_size_per_gpu": work.micro,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"overlap_comm": False, **limits_of(work.hidden), "stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    batches = work.batches(rank)

    def step() -> float:
        total = 0.0
        for _ in range(work.accumulation):
            loss = work.loss(engine, next(batches))
            engine.backward(loss)
            engine.step()
            total += loss.item() / work.accumulation
        return total

    return step
