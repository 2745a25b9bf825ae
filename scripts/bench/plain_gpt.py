"""A GPT-2 of plain torch modules, written in the usual way: the peer of single.py.

Batch first, nn.Linear and nn.LayerNorm, one projection for q, k and v, F.cross_entropy, fused AdamW,
clip_grad_norm_, zero_grad(set_to_none=True). Nothing in it is slowed down on purpose.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block; batch first."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(hidden, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """A GPT-2 with tied embeddings and no dropout."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, seq_len: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(seq_len, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of tokens and targets [B, S]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def take_weights(self, ours: Callable[[str], Tensor]) -> None:
        """Copy the weights of a megazero model of the same shape; `ours` returns them by name.

        Its row-parallel weights are [in, out]; its qkv rows are grouped by head.
        """
        self.tokens.weight.copy_(ours("embedding.tokens.weight"))
        self.positions.weight.copy_(ours("embedding.positions.weight"))
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            name = f"blocks.{i}."
            for norm, theirs in ((block.norm_1, "attention_norm"), (block.norm_2, "mlp_norm")):
                norm.weight.copy_(ours(f"{name}{theirs}.weight"))
                norm.bias.copy_(ours(f"{name}{theirs}.bias"))
            for linear, theirs in ((block.out, "attention.out"), (block.down, "mlp.down")):
                linear.weight.copy_(ours(f"{name}{theirs}.weight").T)
                linear.bias.copy_(ours(f"{name}{theirs}.bias"))
            block.up.weight.copy_(ours(f"{name}mlp.up.weight"))
            block.up.bias.copy_(ours(f"{name}mlp.up_bias"))
            for part in ("weight", "bias"):
                grouped = ours(f"{name}attention.qkv.{part}")
                by_kind = grouped.unflatten(0, (block.heads, 3, -1)).transpose(0, 1)
                getattr(block.qkv, part).copy_(by_kind.reshape(grouped.shape))
        self.norm.weight.copy_(ours("head.norm.weight"))
        self.norm.bias.copy_(ours("head.norm.bias"))
