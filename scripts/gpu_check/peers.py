"""The systems compared with ours: plain torch and FSDP2 on one rank, each without and with torch.compile.

All hold parameters, gradients and moments in fp32 and compute in bf16, as ours does: plain torch with autocast, FSDP2
with its mixed precision. AdamW is torch's fused one; torch chooses the attention. torch.compile compiles the loss and
each block, as torchtitan does (all blocks share one compilation).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from scripts.bench.plain_gpt import PlainGPT
from scripts.gpu_check.findings import Asked
from scripts.gpu_check.speed import LR, Shape, Step, windows

CLIP = 1.0


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in fp32 from logits [B, S, V] and targets [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainGPTOnDevice(PlainGPT):
    """`PlainGPT` with positions that are on the device."""

    loss = staticmethod(loss_of)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.loss(F.linear(self.norm(x), self.tokens.weight), targets)


class LlamaBlock(nn.Module):
    """A Llama block with grouped-query attention and SwiGLU; batch first."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int):
        super().__init__()
        self.sizes = [heads * (hidden // heads), kv_heads * (hidden // heads), kv_heads * (hidden // heads)]
        self.head_dim = hidden // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv, self.out = nn.Linear(hidden, sum(self.sizes), bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).split(self.sizes, dim=2)
        q, k, v = (part.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        q, k = (each * cos + torch.cat((-each.chunk(2, -1)[1], each.chunk(2, -1)[0]), -1) * sin for each in (q, k))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(a.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PlainLlama(nn.Module):
    """A Llama of plain torch modules; head and embedding may be tied."""

    loss = staticmethod(loss_of)

    def __init__(self, model: dict[str, Any], device: torch.device):
        super().__init__()
        hidden, dim = model["hidden"], model["hidden"] // model["heads"]
        self.tokens = nn.Embedding(model["vocab"], hidden)
        sizes = hidden, model["heads"], model["kv_heads"], model["ffn"]
        self.blocks = nn.ModuleList(LlamaBlock(*sizes) for _ in range(model["layers"]))
        self.norm, self.head = nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, model["vocab"], bias=False)
        if model["tie_embeddings"]:
            self.head.weight = self.tokens.weight
        places = torch.arange(model["seq_len"], device=device)[:, None]
        angles = places * model["rope_theta"] ** (-torch.arange(0, dim, 2, device=device) / dim)
        self.angles = [torch.cat((t, t), -1).to(torch.bfloat16) for t in (angles.cos(), angles.sin())]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, (cos, sin) = self.tokens(tokens), self.angles
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.loss(self.head(self.norm(x)), targets)


def built(shape: Shape, device: torch.device) -> nn.Module:
    """Return the model of a shape, with random weights of the same scale as ours."""
    m, generator = shape.model, torch.Generator(device).manual_seed(0)
    for each in ("cudnn", "flash", "mem_efficient", "math"):  # all of them: ours has enabled only one
        getattr(torch.backends.cuda, f"enable_{each}_sdp")(True)
    with device:
        if m["position"] == "learned":
            model: nn.Module = PlainGPTOnDevice(m["layers"], m["hidden"], m["heads"], m["vocab"], m["seq_len"])
        else:
            model = PlainLlama(m, device)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02, generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
    return model


def plain(shape: Shape, micro: int, asked: Asked, *, compiled: bool) -> Step:
    """Return a step of plain torch."""
    model = built(shape, asked.device)
    if compiled:
        compile_blocks(model, asked)
    kind = asked.device.type
    return _step(model, shape, micro, asked, lambda: torch.autocast(kind, torch.bfloat16))


def fsdp2(shape: Shape, micro: int, asked: Asked, *, compiled: bool) -> Step:
    """Return a step of FSDP2 on one rank, this process; needs the process group that `alone` makes."""
    model, mesh = built(shape, asked.device), init_device_mesh(asked.device.type, (1,))
    if compiled:
        compile_blocks(model, asked)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _step(model, shape, micro, asked, nullcontext)


def compile_blocks(model: nn.Module, asked: Asked) -> None:
    """Compile each block and the loss; on a CPU only trace them, because compilation takes a minute."""
    backend = "inductor" if asked.on_gpu else "eager"
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        block.compile(backend=backend)
    model.loss = torch.compile(loss_of, backend=backend)  # pyright: ignore[reportArgumentType]


@contextmanager
def alone(asked: Asked) -> Iterator[None]:
    """Make a process group of this process only."""
    device = asked.device if asked.on_gpu else None
    kind = "nccl" if asked.on_gpu else "gloo"
    dist.init_process_group(kind, store=HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _step(
    model: nn.Module, shape: Shape, micro: int, asked: Asked, precision: Callable[[], AbstractContextManager]
) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, count = windows(shape), shape.sequences // micro

    def step(number: int) -> Tensor:
        window = next(tokens).T.contiguous()
        if asked.on_gpu:
            window = window.pin_memory().to(asked.device, non_blocking=True)
        total = torch.zeros((), device=asked.device)
        for part in window.split(micro):
            with precision():
                loss = model(part[:, :-1], part[:, 1:]) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step
