"""Share key-value heads between tensor ranks by an exchange of activations: no weight is on two ranks."""

import torch
from torch import Tensor

from megazero.comm.regions import Region
from megazero.comm.rows import exchange_rows
from megazero.model.linear import ColumnProducts
from megazero.model.tape import Owner, Tape
from megazero.plan.heads import counts, rows_for
from megazero.plan.model import Shape


class SharedHeads(ColumnProducts):
    """The projection to queries, keys and values, followed by the exchange."""

    def __init__(self, region: Region, owner: Owner, shape: Shape):
        super().__init__(region, owner)
        self._axis = axis = region.axis
        self._counts = counts(shape, axis.size)
        self._sent = [rows for each in rows_for(shape, axis.size)[axis.rank] for rows in each]

    def run(self, tape: Tape, x_nD: Tensor) -> tuple[Tensor, ...]:
        """Return the queries, key and value of this rank's heads, [N, (Q + 2) d]."""
        (part_NP,) = super().run(tape, x_nD)
        rows = torch.cat([part_NP.T[rows] for rows in self._sent])
        return (exchange_rows(rows, self._counts, self._axis, "heads").T.contiguous(),)

    def back(self, tape: Tape, grad: Tensor) -> Tensor:
        """Return the gradient of x; those of a key or value are summed over the ranks that used it."""
        back = [list(column) for column in zip(*self._counts, strict=True)]
        received = exchange_rows(grad.T.contiguous(), back, self._axis, "heads")
        found = grad.new_zeros(len(self.owners[0]["weight"]), len(grad))
        for rows, each in zip(self._sent, received.split([rows.stop - rows.start for rows in self._sent]), strict=True):
            found[rows] += each
        return super().back(tape, found.T.contiguous())
