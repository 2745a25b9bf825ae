"""The peer of tensor.py: an untied GPT-2 in plain torch, and a plan that spreads it over ranks with torch DTensor.

In one process it is a model of ordinary modules. `spread` applies torch's tensor parallelism
(`torch.distributed.tensor.parallel`), arranged to be as fast as possible:

- q, k and v are one column-wise linear whose rows are grouped by head, so that a rank holds whole heads and a block has
  two collectives in forward and two in backward, like ours (sequence plan: four and four, of half the traffic);
- embedding and head are split along the vocabulary, and `loss_parallel` gathers no logits;
- the residual stream is plain tensors, so that only linears, and norms in the sequence plan, pay DTensor's dispatch;
- activations are sequence first, so that gathering and scattering the sequence copies nothing;
- gradients that are partial sums take one all-reduce, not one per parameter, and the gradient norm takes another one.

Shapes: S sequence (or this rank's part of it), B batch, D hidden, H heads of this rank, d head dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


class Block(nn.Module):
    """A pre-norm transformer block; sequence first."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.head_dim = hidden // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_SBD: Tensor) -> Tensor:
        qkv_SBHd = self.qkv(self.norm_1(x_SBD)).unflatten(2, (-1, 3, self.head_dim)).unbind(3)
        q, k, v = (t.permute(1, 2, 0, 3) for t in qkv_SBHd)
        a_BHSd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_SBD = x_SBD + self.out(a_BHSd.permute(2, 0, 1, 3).flatten(2))
        return x_SBD + self.down(F.gelu(self.up(self.norm_2(x_SBD)), approximate="tanh"))


class Positions(nn.Module):
    """The learned positions [S, 1, D] of the part of the sequence that is in this process."""

    def __init__(self, seq_len: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(seq_len, hidden))

    def forward(self) -> Tensor:
        return _local(self.weight)[:, None]


class UntiedGPT(nn.Module):
    """A GPT-2 without dropout whose head has a weight of its own."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, seq_len: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), Positions(seq_len, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of tokens and targets [S, B] (the whole sequence)."""
        x_SBD = self.tokens(tokens) + self.positions()
        for block in self.blocks:
            x_SBD = block(x_SBD)
        logits = self.head(self.norm(x_SBD))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def take_weights(self, ours: Callable[[str], Tensor]) -> None:
        """Copy the weights of a megazero model of the same shape; `ours` returns them by name.

        Its row-parallel weights are [in, out].
        """
        names = {"tokens": "embedding.tokens", "positions": "embedding.positions", "norm": "head.norm", "head": "head"}
        for i in range(len(self.blocks)):
            theirs = {"norm_1": "attention_norm", "qkv": "attention.qkv", "out": "attention.out"}
            theirs |= {"norm_2": "mlp_norm", "up": "mlp.up", "down": "mlp.down"}
            names |= {f"blocks.{i}.{mine}": f"blocks.{i}.{name}" for mine, name in theirs.items()}
        for name, parameter in self.named_parameters():
            module, _, kind = name.rpartition(".")
            joint = "_" if name.endswith("up.bias") else "."  # ours is named up_bias, as a gated MLP has two matrices
            value = ours(f"{names[module]}{joint}{kind}")
            parameter.copy_(value.T if module.endswith((".out", ".down")) and kind == "weight" else value)


def spread(model: UntiedGPT, mesh: DeviceMesh, sequence: bool) -> None:
    """Split the model over the mesh; with `sequence` also split the activations between matrices along the sequence."""
    stream = Shard(0) if sequence else Replicate()
    into, out_of = ColwiseParallel(input_layouts=stream), RowwiseParallel(output_layouts=stream)
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "blocks.*.qkv": into,
        "blocks.*.out": out_of,
        "blocks.*.up": into,
        "blocks.*.down": out_of,
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        # Positions are split like the residual stream: a rank needs only its own, and their gradients need no sum.
        model.positions.weight = nn.Parameter(distribute_tensor(model.positions.weight, mesh, [Shard(0)]))
        plan |= {name: SequenceParallel(sequence_dim=0) for name in ("blocks.*.norm_1", "blocks.*.norm_2", "norm")}
    parallelize_module(model, mesh, plan)


def make_optimizers(model: nn.Module, **options: float | tuple[float, float]) -> list[torch.optim.Optimizer]:
    """Return fused AdamW optimizers of all parameters; matrices and the token embedding decay.

    DTensors and other tensors have an optimizer each: the fused update refuses lists that mix them.
    """
    decay = options.pop("weight_decay")
    optimizers: list[torch.optim.Optimizer] = []
    for distributed in (True, False):
        mine = [(n, p) for n, p in model.named_parameters() if isinstance(p, DTensor) == distributed]
        groups = [
            {
                "params": [p for n, p in mine if (p.dim() == 2 and "positions" not in n) == decays],
                "weight_decay": decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        if groups:
            optimizers.append(torch.optim.AdamW(groups, fused=True, **options))  # type: ignore[arg-type]
    return optimizers


@torch.no_grad()
def complete_and_clip(model: UntiedGPT, limit: float) -> None:
    """Sum the partial gradients of a spread model, and clip their global norm."""
    _complete([p for p in model.parameters() if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial()])
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    split = [g for g in grads if isinstance(g, DTensor) and g.placements[0].is_shard()]
    whole = [_local(g) for g in grads if all(g is not s for s in split)]
    square = torch.nn.utils.get_total_norm([g.to_local() for g in split]) ** 2
    square = DTensor.from_local(square, split[0].device_mesh, [Partial()]).full_tensor()
    norm = (square + torch.nn.utils.get_total_norm(whole) ** 2).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        _local(grad).mul_(factor)


def _complete(parameters: list[nn.Parameter]) -> None:
    """Sum the gradients of these parameters over the ranks, in one all-reduce."""
    if not parameters:
        return
    parts = [_local(p.grad) for p in parameters if p.grad is not None]
    mesh = parameters[0].device_mesh  # type: ignore[attr-defined]
    flat = DTensor.from_local(torch.cat([part.flatten() for part in parts]), mesh, [Partial()]).full_tensor()
    for parameter, part, whole in zip(parameters, parts, flat.split([part.numel() for part in parts]), strict=True):
        parameter.grad = DTensor.from_local(whole.view_as(part), mesh, [Replicate()], run_check=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
