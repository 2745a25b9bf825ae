"""Llama 3 and Qwen 3 in plain torch modules, written in the usual way: the peers of single.py.

Batch first, nn.Linear and nn.RMSNorm, grouped queries and rotary embeddings with cosines and sines that are computed
once, F.cross_entropy. Nothing in it is slowed down on purpose.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.model import Model


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [B, heads, S, d] turned by their positions' angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RotaryBlock(nn.Module):
    """A pre-norm transformer block without biases; its norms of heads are optional."""

    def __init__(self, m: Model, head_dim: int, kv_heads: int, ffn: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = m.heads, kv_heads, head_dim
        self.norm_1, self.norm_2 = (nn.RMSNorm(m.hidden, eps=m.norm_eps) for _ in range(2))
        self.qkv = nn.Linear(m.hidden, (m.heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(m.heads * head_dim, m.hidden, bias=False)
        self.gate, self.up = (nn.Linear(m.hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, m.hidden, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(head_dim, eps=m.norm_eps) if m.qk_norm == "head" else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, -1, self.head_dim)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainLlama(nn.Module):
    """A model of `RotaryBlock`s for a resolved config."""

    def __init__(self, m: Model):
        super().__init__()
        assert m.kv_heads and m.ffn and m.rope_theta
        size = m.head_dim or m.hidden // m.heads
        self.tokens = nn.Embedding(m.vocab, m.hidden)
        self.blocks = nn.ModuleList(RotaryBlock(m, size, m.kv_heads, m.ffn) for _ in range(m.layers))
        self.norm = nn.RMSNorm(m.hidden, eps=m.norm_eps)
        self.head = nn.Linear(m.hidden, m.vocab, bias=False)
        if m.tie_embeddings:
            self.head.weight = self.tokens.weight
        angles = torch.arange(m.seq_len)[:, None] * m.rope_theta ** (torch.arange(0, size, 2) / -size)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of tokens and targets [B, S]."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def take_weights(self, ours: Callable[[str], Tensor]) -> None:
        """Copy the weights of a megazero model of the same shape; see `PlainGPT.take_weights`."""
        self.tokens.weight.copy_(ours("embedding.tokens.weight"))
        self.norm.weight.copy_(ours("head.norm.weight"))
        if self.head.weight is not self.tokens.weight:
            self.head.weight.copy_(ours("head.weight"))
        for i, block in enumerate(self.blocks):
            assert isinstance(block, RotaryBlock)
            name = f"blocks.{i}."
            block.norm_1.weight.copy_(ours(f"{name}attention_norm.weight"))
            block.norm_2.weight.copy_(ours(f"{name}mlp_norm.weight"))
            block.out.weight.copy_(ours(f"{name}attention.out.weight").T)
            block.down.weight.copy_(ours(f"{name}mlp.down.weight").T)
            block.gate.weight.copy_(ours(f"{name}mlp.gate.weight"))
            block.up.weight.copy_(ours(f"{name}mlp.up.weight"))
            groups = ours(f"{name}attention.qkv.weight").unflatten(0, (block.kv_heads, -1, block.head_dim))
            kinds = groups.split((block.heads // block.kv_heads, 1, 1), dim=1)
            block.qkv.weight.copy_(torch.cat([kind.flatten(0, 2) for kind in kinds]))
            for norm, theirs in ((block.q_norm, "q_norm"), (block.k_norm, "k_norm")):
                if isinstance(norm, nn.RMSNorm):
                    norm.weight.copy_(ours(f"{name}attention.{theirs}.weight"))
