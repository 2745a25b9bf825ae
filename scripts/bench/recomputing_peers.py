"""The peers of memory.py: recompute with torch and with DeepSpeed, around every block of a plain GPT.

torch        torch.utils.checkpoint, non-reentrant, with its early stop (the default); no random state is kept, as there
             is no dropout
DeepSpeed    deepspeed.checkpointing of the same model spread with DTensor: whole inputs, inputs partitioned over the
             tensor ranks (partition_activations), or these on the host (cpu_checkpointing)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from megazero.config.schema import Config
from scripts.bench.data_parallel import join_deepspeed
from scripts.bench.dtensor_gpt import UntiedGPT, complete_and_clip, make_optimizers, spread
from scripts.bench.ours import ADAM, CLIP, initial_weights, meet, random_batches

Around = Callable[[Callable[[Tensor], Tensor], Tensor], Any]


def plain_step(config: Config, again: bool) -> Callable[[], float]:
    """Return a training step of plain torch in one process; `again`: with recompute."""
    model = _peer(config, _torch_checkpoint if again else None)
    (optimizer,) = make_optimizers(model, **ADAM)
    batches = random_batches(config.batch.rows)

    def step() -> float:
        loss = model(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def spread_step(config: Config, again: str, rank: int, size: int, store: str) -> Callable[[], float]:
    """Return a training step of the same model spread over `size` tensor ranks with DTensor.

    Args:
        again: none | torch | deepspeed | deepspeed partitioned | deepspeed partitioned, cpu.
    """
    around = {"none": None, "torch": _torch_checkpoint}.get(again)
    if again.startswith("deepspeed"):
        around = _configured(join_deepspeed(rank, size, store), config.model.layers, again)
    else:
        meet(rank, size, store)
    model = _peer(config, around)
    spread(model, init_device_mesh("cpu", (size,)), sequence=config.parallel.sequence)
    optimizers = make_optimizers(model, **ADAM)
    batches = random_batches(config.batch.rows)

    def step() -> float:
        with loss_parallel():
            loss = model(*next(batches))
            loss.backward()
        complete_and_clip(model, CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.full_tensor().item()

    return step


def _peer(config: Config, around: Around | None) -> UntiedGPT:
    m = config.model
    model = UntiedGPT(m.layers, m.hidden, m.heads, m.vocab, m.seq_len)
    model.take_weights(initial_weights(config))
    if around is not None:
        for block in model.blocks:
            block.forward = lambda x, forward=block.forward: around(forward, x)
    return model


def _torch_checkpoint(forward: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)


class _TensorRanks:
    """The model-parallel interface that DeepSpeed needs; all ranks are tensor ranks."""

    get_model_parallel_rank = staticmethod(torch.distributed.get_rank)
    get_model_parallel_world_size = staticmethod(torch.distributed.get_world_size)
    get_model_parallel_group = staticmethod(lambda: torch.distributed.group.WORLD)


def _configured(deepspeed: Any, blocks: int, again: str) -> Around:
    deepspeed.checkpointing.configure(
        _TensorRanks,
        partition_activations="partitioned" in again,
        checkpoint_in_cpu="cpu" in again,
        num_checkpoints=blocks,
    )
    return deepspeed.checkpointing.checkpoint
