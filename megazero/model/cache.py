"""Keep keys and values of earlier tokens, so that each new token passes the model alone.

All samples of a batch grow together: the texts are aligned at their ends, and a sample's first `pads` columns are
padding, which no token attends to. A layer with a window keeps the keys of its window, and what a pass adds to them.

Shapes: B samples, G key-value heads of this rank, H query heads, d head dim; n new columns, m columns that are kept.
"""

import torch
from torch import Tensor

from megazero.model.blocked_attention import Blocked


class _Columns:
    """The keys and values of one layer: columns [first, stop) of the text.

    Args:
        room: the number of columns that there is memory for.
        window: how many of the last columns are needed when there is no more room; None: all.
    """

    def __init__(self, like_BGnd: Tensor, room: int, window: int | None):
        samples, heads, _, size = like_BGnd.shape
        self.both = like_BGnd.new_empty(2, samples, heads, room, size)
        self._window, self.first, self.stop = window, 0, 0

    def add(self, k_BGnd: Tensor, v_BGnd: Tensor) -> tuple[Tensor, Tensor]:
        """Append columns; return all keys and values that are kept, [B, G, m, d]."""
        new, held = k_BGnd.shape[2], self.stop - self.first
        if held + new > self.both.shape[3]:
            assert self._window is not None, "there is room for the whole text"
            kept = min(held, self._window - 1)
            self.both[:, :, :, :kept] = self.both[:, :, :, held - kept : held].clone()
            self.first, held = self.stop - kept, kept
        self.both[0, :, :, held : held + new], self.both[1, :, :, held : held + new] = k_BGnd, v_BGnd
        self.stop += new
        k, v = self.both[:, :, :, : held + new]
        return k, v


class Cache:
    """The keys and values of all layers for one batch.

    Args:
        pads: for each sample, the number of its first columns that are padding.
        length: the most columns of the batch.
        limit: the number of positions of the model; a text that has ended stays at the last one.
        chunk: the most columns of one pass.

    Attributes:
        stop: the number of columns that have passed the whole model.
    """

    def __init__(self, pads: list[int], length: int, limit: int, chunk: int, device: torch.device):
        self._pads_B = torch.tensor(pads, device=device) if any(pads) else None
        self._length, self._limit, self._chunk, self._device = length, limit, chunk, device
        self.layers: dict[object, _Columns] = {}
        self.stop = 0

    def positions(self, new: int) -> Tensor:
        """Return the positions of the next columns in their texts, int64 [n, B]; 0 for padding."""
        columns = torch.arange(self.stop, self.stop + new, device=self._device)[:, None]
        return (columns if self._pads_B is None else columns - self._pads_B).clamp(0, self._limit - 1)

    def attend(self, layer: object, how: Blocked, q_SBHd: Tensor, k_SBGd: Tensor, v_SBGd: Tensor) -> Tensor:
        """Add a layer's keys and values; return the output of its heads for the new columns, [S, B, H d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHd, k_SBGd, v_SBGd))
        columns = self.layers.get(layer)
        if columns is None:
            room = self._length if how.window is None else min(self._length, 2 * how.window + self._chunk)
            columns = self.layers[layer] = _Columns(k, room, how.window)
        k, v = columns.add(k, v)
        return how.attend(q, k, v, self._sees(how, columns, q.shape[2])).permute(2, 0, 1, 3).flatten(2)

    def _sees(self, how: Blocked, columns: _Columns, new: int) -> Tensor | None:
        """Return which keys each new column attends to, bool [B or 1, 1, n, m]; None: all.

        A column of padding attends to itself, because a softmax over no key is not a number.
        """
        seen = torch.arange(columns.first, columns.stop, device=self._device)
        own = torch.arange(columns.stop - new, columns.stop, device=self._device)[:, None]
        sees = how.sees(own - seen)[None, None]
        if self._pads_B is not None:
            sees = (sees & (seen >= self._pads_B[:, None, None, None])) | (own == seen)
        elif new == 1 and (how.window is None or columns.stop - columns.first <= how.window):
            return None
        return sees
