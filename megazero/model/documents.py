"""Keep the documents of a window apart in attention (`data.mask_eod`), without a matrix of [S, S].

A causal mask that stops at the ends of documents is causal attention inside each of them. So documents of equal length
are one plain batch: rows of the projection are put into an order in which they lie together, each batch goes through
attention as a micro-batch of that length would, and the results are put back. What it keeps for backward is O(S).

Of S B tokens no more than sqrt(2 S B) documents have different lengths, so there are few batches: 90 of 4,096 tokens at
most, and one of a thousand documents of four tokens.

Shapes: S sequence, B samples, L length and N number of some documents.
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
    """Take rows in another order; as every row is taken once, the gradient is taken in the inverse order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch. Their lengths are known on the host, so the host does not wait for a device.

    Attributes:
        lengths: of the documents of each sample, in their order; those of a sample add up to S.
        device: where attention is computed.
    """

    lengths: tuple[tuple[int, ...], ...]
    device: torch.device

    def attend(self, attention: Callable[[Tensor], Tensor], x_SBD: Tensor) -> Tensor:
        """Return what `attention` makes of each document for itself: [S, B, D'].

        Args:
            attention: called with documents of one length, [L, N, D]; returns [L, N, D'].
        """
        order, inverse = self._orders
        parts = _Reorder.apply(x_SBD.flatten(0, 1), order, inverse).split([n * count for n, count in self.groups])
        shaped = (part.view(*group, -1) for part, group in zip(parts, self.groups, strict=True))
        seen = torch.cat([attention(x_LND).flatten(0, 1) for x_LND in shaped])
        return _Reorder.apply(seen, inverse, order).view(*x_SBD.shape[:2], -1)

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """Return (length, number of documents that have it), by rising length."""
        return sorted(Counter(length for of in self.lengths for length in of).items())

    @cached_property
    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return self.groups[-1][0]

    @cached_property
    def bounds(self) -> Tensor:
        """Return where documents begin among the tokens of all samples, sample after sample, and the end: int32."""
        return self._there(np.cumsum([0, *(n for of in self.lengths for n in of)], dtype=np.int32))

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor]:
        """Return which rows of [S B, ...] are taken in the order of groups, and the inverse: int64 [S B].

        In a group rows are ordered by position, then by document, which makes it [L, N].
        """
        samples, firsts = len(self.lengths), {length: list[int]() for length, _ in self.groups}
        for sample, of in enumerate(self.lengths):
            for length, end in zip(of, accumulate(of), strict=True):
                firsts[length].append((end - length) * samples + sample)
        order = np.concatenate([(np.arange(n)[:, None] * samples + rows).ravel() for n, rows in firsts.items()])
        return self._there(order), self._there(np.argsort(order))

    def _there(self, numbers: np.ndarray) -> Tensor:
        """Return numbers as a tensor on the device."""
        return fetched(torch.tensor(numbers), self.device)
