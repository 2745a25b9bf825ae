"""Limit attention to the documents of a sequence (`data.mask_eod`), without an [S, S] mask.

A causal mask that ends at document boundaries is causal attention inside each document. So documents of equal length
form a plain batch: the rows of the projection are reordered by document length, each batch goes through attention like
a micro-batch of that length, and the results are put back in order. The memory kept for backward is O(S).

S B tokens contain documents of at most sqrt(2 S B) different lengths, so there are few batches: at most 90 for 4,096
tokens, and one for a thousand documents of four tokens.

Shapes: S sequence, B samples, and N documents of length L in one batch.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.comm.pinned import fetched


class _Reorder(torch.autograd.Function):
    """Permute rows; the backward applies the inverse permutation to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch. Lengths are known on the host, so it does not wait for the device.

    Attributes:
        lengths: for each sample, the lengths of its documents in order; they add up to S.
        device: the device that computes attention.
    """

    lengths: tuple[tuple[int, ...], ...]
    device: torch.device

    def attend(self, attention: Callable[[Tensor], Tensor], x_SBD: Tensor) -> Tensor:
        """Apply `attention` to each document separately; return the results, [S, B, D'].

        Args:
            attention: function of documents of one length, [L, N, D] -> [L, N, D'].
        """
        order, inverse = self._orders
        parts = _Reorder.apply(x_SBD.flatten(0, 1), order, inverse).split([n * count for n, count in self.groups])
        shaped = (part.view(*group, -1) for part, group in zip(parts, self.groups, strict=True))
        seen = torch.cat([attention(x_LND).flatten(0, 1) for x_LND in shaped])
        return _Reorder.apply(seen, inverse, order).view(*x_SBD.shape[:2], -1)

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """Return (length, number of documents of this length), by ascending length."""
        return sorted(Counter(length for of in self.lengths for length in of).items())

    @cached_property
    def bounds(self) -> Tensor:
        """Return where documents start in the concatenated samples, in tokens, then the end: int32 [documents + 1]."""
        return self._there(np.cumsum([0, *(n for of in self.lengths for n in of)], dtype=np.int32))

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor]:
        """Return the permutation of the rows of [S B, ...] into the order of groups, and its inverse: int64 [S B].

        In a group rows are ordered by position, then by document, which gives [L, N].
        """
        samples, firsts = len(self.lengths), {length: list[int]() for length, _ in self.groups}
        for sample, of in enumerate(self.lengths):
            for length, end in zip(of, accumulate(of), strict=True):
                firsts[length].append((end - length) * samples + sample)
        order = np.concatenate([(np.arange(n)[:, None] * samples + rows).ravel() for n, rows in firsts.items()])
        return self._there(order), self._there(np.argsort(order))

    def _there(self, numbers: np.ndarray) -> Tensor:
        """Return the numbers as a tensor on the device."""
        return fetched(torch.tensor(numbers), self.device)
