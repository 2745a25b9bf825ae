"""The peers of pipeline.py: the untied GPT-2 of dtensor_gpt.py in stages under torch.distributed.pipelining.

Cuts and micro-batches are those of ours; schedules are torch's. Gradients are clipped by the norm over both ranks.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from scripts.bench.dtensor_gpt import UntiedGPT, make_optimizers

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
ONE_STAGE = ("gpipe", "1f1b")  # schedules with one stage per rank take a stage, the others a list


class Part(nn.Module):
    """Consecutive parts of the model: 0 is the embedding, then blocks, then the head."""

    def __init__(self, model: UntiedGPT, parts: range):
        super().__init__()
        last = len(model.blocks) + 1
        self.tokens, self.positions = (model.tokens, model.positions) if 0 in parts else (None, None)
        self.blocks = nn.ModuleList(model.blocks[i - 1] for i in parts if 0 < i < last)
        self.norm, self.head = (model.norm, model.head) if last in parts else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions()
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def make_step(
    model: UntiedGPT,
    name: str,
    cuts: dict[int, range],
    num_stages: int,
    batches: Callable[[], tuple[Tensor, Tensor]],
    micro_batches: int,
    clip: float,
    adam: dict[str, float | tuple[float, float]],
) -> Callable[[], float]:
    """Return a training step on one rank.

    Args:
        cuts: number of a stage -> its parts, for this rank's stages.
        batches: returns (tokens, targets) [S, B] of all micro-batches of a step, each of one sequence.
    """
    device = torch.device("cpu")
    parts = [Part(model, parts) for parts in cuts.values()]
    stages = [PipelineStage(part, index, num_stages, device) for index, part in zip(cuts, parts, strict=True)]
    options = {"loss_fn": _loss, "args_chunk_spec": (TensorChunkSpec(1),)}
    schedule = SCHEDULES[name](stages[0] if name in ONE_STAGE else stages, micro_batches, **options)
    mine = nn.ModuleList(parts)
    optimizers = make_optimizers(mine, **adam)
    first, last = 0 in cuts, num_stages - 1 in cuts

    def step() -> float:
        tokens_SB, targets_SB = batches()
        losses: list[Tensor] = []
        given = (tokens_SB,) if first else ()
        wanted = {"target": targets_SB.T.contiguous(), "losses": losses} if last else {}
        schedule.step(*given, **wanted, return_outputs=False)
        _clip(list(mine.parameters()), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean() if last else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()

    return step


def _loss(logits_SBV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_SBV.flatten(0, 1), targets_BS.flatten())


def _clip(parameters: Sequence[nn.Parameter], clip: float) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(square)
    factor = (clip / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
