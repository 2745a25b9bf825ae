"""Token and position embeddings, and the output projection that may share the token weight.

The vocabulary is split by rows over the tensor axis, and padded to a multiple of the axis size in memory only: padding
rows are zero, their logits are -inf, and they are never saved, counted or exported.
"""

from torch import Tensor, nn

from megazero.comm.regions import Region, leave
from megazero.model.parameter import declare
from megazero.model.tape import Owner, Tape, apply


class Lookup:
    """The lookup of rows in a table [rows, D]; backward adds each gradient to the row that was looked up.

    Args:
        owner: has the table as its "weight".
    """

    def __init__(self, owner: Owner):
        self.owners = (owner,)

    def run(self, tape: Tape, indices: Tensor, absent: Tensor | None) -> Tensor:
        """Return table[indices], [*indices.shape, D].

        Args:
            absent: bool like `indices`, True for rows that are not in this table: they give zeros and get no gradient.
        """
        table = self.owners[0]["weight"]
        tape.keep((indices, absent, tape.use(table)))
        return _without(table[indices], absent)

    def back(self, tape: Tape, grad: Tensor) -> tuple[None, None]:
        """Deliver the gradient of the rows that were looked up."""
        indices, absent, slot = tape.take()
        values = grad if absent is None else _without(grad.clone(), absent)
        rows = indices.reshape(-1)
        slot.add_rows(rows, values.reshape(len(rows), -1))
        return None, None


def _without(rows: Tensor, absent: Tensor | None) -> Tensor:
    return rows if absent is None else rows.masked_fill_(absent[..., None], 0.0)


class TokenEmbedding(nn.Module):
    """The token embedding: weight [vocab / tensor, hidden], with weight decay, as it may also be the output projection.

    A rank looks up only ids of its own rows; the sum over the tensor axis combines the ranks' results.
    """

    def __init__(self, vocab: int, hidden: int, *, std: float, region: Region):
        super().__init__()
        self.weight = declare((vocab, hidden), std=std, decay=True, axis=region.axis)
        self.region = region
        self._lookup = Lookup(self._parameters)

    def forward(self, tokens_SB: Tensor) -> Tensor:
        """Return [S, B, D]; with sequence parallelism, this rank's part of it."""
        if self.region.axis.size == 1:  # saves two passes over the result
            return apply(self._lookup, tokens_SB, None)
        indices = tokens_SB - self.region.axis.rank * len(self.weight)
        absent = (indices < 0) | (indices >= len(self.weight))
        return leave(apply(self._lookup, indices.masked_fill(absent, 0), absent), self.region)


class PositionEmbedding(nn.Module):
    """Learned positions (GPT-2): weight [seq_len, hidden], replicated on all ranks, without weight decay."""

    def __init__(self, seq_len: int, hidden: int, *, std: float):
        super().__init__()
        self.weight = declare((seq_len, hidden), std=std)
        self._lookup = Lookup(self._parameters)

    def forward(self, positions: Tensor) -> Tensor:
        """Return [S, 1, D] or [S, B, D] for int64 positions of shape [S] or [S, B]."""
        embedded = apply(self._lookup, positions, None)
        return embedded[:, None] if positions.dim() == 1 else embedded
