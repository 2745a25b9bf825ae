"""The systems that zero.py compares with ours.

They are plain torch without exchange, DDP, ZeroRedundancyOptimizer, FSDP1, FSDP2, and DeepSpeed.

All train `plain_gpt.PlainGPT` from our initial weights, with fused AdamW, the same decay of the same parameters, and
the global gradient norm clipped to the same limit. Each is set up as its own documentation advises; nothing is slowed
down on purpose.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from megazero.config.schema import Config
from scripts.bench.ours import BETAS, CLIP, CPU, DECAY, EPS, LR, initial_weights, meet, random_batches
from scripts.bench.plain_gpt import Block, PlainGPT

Step = Callable[[], float]
ADAM = {"lr": LR, "betas": BETAS, "eps": EPS, "fused": True}


def peer(config: Config) -> PlainGPT:
    """Return the whole model, with the weights that ours starts from."""
    m = config.model
    model = PlainGPT(m.layers, m.hidden, m.heads, m.vocab, m.seq_len)
    model.take_weights(initial_weights(config))
    return model


def groups(named: Iterable[tuple[str, nn.Parameter]], decays: set[str]) -> list[dict]:
    """Return the parameter groups for torch's AdamW; `decays` are the names whose parameters decay."""
    named = list(named)
    return [
        {"params": [p for n, p in named if (n in decays) == decay], "weight_decay": DECAY if decay else 0.0}
        for decay in (True, False)
    ]


def decaying(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if p.dim() == 2 and "positions" not in n}


def micro_batches(config: Config, rank: int, size: int) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    """Return a function that gives this rank's (tokens, targets) [B, S] of each step."""
    batches = random_batches(config.batch.micro, rank)
    accumulation = config.batch.global_ // (config.batch.micro * size)
    return lambda: [(tokens.T, targets.T) for tokens, targets in (next(batches) for _ in range(accumulation))]


def torch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    next_step: Callable[[], list[tuple[Tensor, Tensor]]],
    clip: Callable[[], object],
    quiet: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Step:
    """Return a step in plain torch style; `quiet` is around all micro-batches but the last."""

    def step() -> float:
        batches, total = next_step(), 0.0
        for number, (tokens, targets) in enumerate(batches):
            with quiet() if number < len(batches) - 1 else contextlib.nullcontext():
                loss = model(tokens, targets) / len(batches)
                loss.backward()
            total += loss.item()
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def clip_of(model: nn.Module) -> Callable[[], object]:
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def plain_rank(config: Config, rank: int, size: int, store: str) -> Step:
    """Return a step that exchanges nothing: each rank updates the whole of a model of its own."""
    model = peer(config)
    optimizer = torch.optim.AdamW(groups(model.named_parameters(), decaying(model)), **ADAM)
    return torch_step(model, optimizer, micro_batches(config, rank, size), clip_of(model))


def ddp_rank(config: Config, static_graph: bool, rank: int, size: int, store: str) -> Step:
    meet(rank, size, store)
    model = peer(config)
    optimizer = torch.optim.AdamW(groups(model.named_parameters(), decaying(model)), **ADAM)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static_graph)
    return torch_step(wrapped, optimizer, micro_batches(config, rank, size), clip_of(model), wrapped.no_sync)


def zero_redundancy_rank(config: Config, rank: int, size: int, store: str) -> Step:
    meet(rank, size, store)
    model = peer(config)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = groups(model.named_parameters(), decaying(model))
    optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **ADAM)
    return torch_step(wrapped, optimizer, micro_batches(config, rank, size), clip_of(model), wrapped.no_sync)


def fsdp1_rank(config: Config, strategy: str, rank: int, size: int, store: str) -> Step:
    meet(rank, size, store)
    model = peer(config)
    decays = decaying(model)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        device_id=CPU,
    )
    clean = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in wrapped.named_parameters()]
    optimizer = torch.optim.AdamW(groups(clean, decays), **ADAM)
    return torch_step(
        wrapped, optimizer, micro_batches(config, rank, size), lambda: wrapped.clip_grad_norm_(CLIP), wrapped.no_sync
    )


def fsdp2_rank(config: Config, reshard: bool, rank: int, size: int, store: str) -> Step:
    """Return a step of FSDP2: blocks resharded after their forward or not, the root by its default (it is not)."""
    meet(rank, size, store)
    model = peer(config)
    decays = decaying(model)
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    root = fully_shard(model, mesh=mesh)

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        yield
        root.set_requires_gradient_sync(True)

    optimizer = torch.optim.AdamW(groups(model.named_parameters(), decays), **ADAM)
    return torch_step(model, optimizer, micro_batches(config, rank, size), clip_of(model), quiet)


def join_deepspeed(rank: int, size: int, store: str) -> Any:
    """Join the other ranks; return the library, which is imported no sooner because importing it prints."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.dup2(2, 1)  # it prints what it does; the parent's output is a table or JSON
    meet(rank, size, store)
    import deepspeed  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def limits_of(config: Config) -> dict[str, int]:
    """Return DeepSpeed's limits, in elements, for a model of this size.

    Its defaults (buckets of 5e8, 1e9 live parameters) are for models of billions of parameters: none would ever be
    reached here, so nothing would be released or sent before the end. A bucket holds a block's parameters, two blocks
    are live, and a matrix of ten rows of the hidden size stays (the rule that its documentation gives for "auto").
    """
    hidden = config.model.hidden
    block = 12 * hidden * hidden
    return {
        "reduce_bucket_size": block,
        "allgather_bucket_size": block,
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 2 * block,
        "stage3_param_persistence_threshold": 10 * hidden,
    }


def deepspeed_rank(config: Config, stage: int, rank: int, size: int, store: str) -> Step:
    """Return a step of DeepSpeed.

    Overlap of communication is off: it takes a second stream of the accelerator, and its CPU accelerator has none. Its
    shared-memory collectives serve its inference engine alone, so training goes through gloo's sockets.
    """
    deepspeed = join_deepspeed(rank, size, store)
    model = peer(config)
    accumulation = config.batch.global_ // (config.batch.micro * size)
    settings = {
        "train_micro_batch_size_per_gpu": config.batch.micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "overlap_comm": False, **limits_of(config)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(groups(model.named_parameters(), decaying(model)), **ADAM)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    next_step = micro_batches(config, rank, size)

    def step() -> float:
        total = 0.0
        for tokens, targets in next_step():
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulation
        return total

    return step
