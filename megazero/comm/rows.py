"""Send rows between all ranks of an axis: each rank has different rows for each of the others (all-to-all).

On NCCL this is NCCL's all-to-all. Elsewhere it is one exchange of messages (`transport/exchange.py`), all padded to the
longest; each reader takes the rows that are for it. Every rank must know how many rows each rank has for each: see
`exchange_counts`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.collectives import Pending, all_gather, begin, nccl_pending, start_all_to_all
from megazero.comm.grid import Axis

Counts = list[list[int]]  # [from][to]


def exchange_counts(own: Sequence[int], axis: Axis, device: torch.device) -> Counts:
    """Return the `own` of every rank: its row counts for each rank, then any other numbers. The host waits for it."""
    mine = torch.tensor(own, dtype=torch.int64, device=device)
    return all_gather(mine, axis, "row counts").view(axis.size, len(own)).tolist()


def exchange_rows(rows: Tensor, counts: Counts, axis: Axis, purpose: str) -> Tensor:
    """Return the rows that all ranks have for this one, in rank order; see `start_exchange`."""
    return rows if axis.size == 1 else start_exchange(rows, counts, axis, purpose).wait()


def start_exchange(rows: Tensor, counts: Counts, axis: Axis, purpose: str, *, out: Tensor | None = None) -> Pending:
    """Start to send rows to all ranks of an axis; its result are the rows for this one, in rank order.

    Args:
        rows: [n, ...], contiguous: rows for rank 0 first, then rows for rank 1, and so on, its own among them.
        counts: the number of rows that each rank has for each.
        out: memory for the result; None: new memory.

    Raises:
        CollectiveError: a rank does not take part.
    """
    outgoing, incoming = counts[axis.rank], [of_rank[axis.rank] for of_rank in counts]
    assert len(rows) == sum(outgoing), f"{len(rows)} rows, {outgoing} were announced"
    width = rows.shape[1:].numel()
    sent = (sum(outgoing) - outgoing[axis.rank]) * width
    received = rows.new_empty((sum(incoming), *rows.shape[1:])) if out is None else out
    if axis.comm.backend == "nccl":
        begin("all_to_all", rows[:0], axis, purpose, sent)
        work = dist.all_to_all_single(received, rows, incoming, outgoing, group=axis.group, async_op=True)
        return nccl_pending(axis, purpose, work, lambda: received)
    messages, places = (rows.new_zeros((axis.size, max(1, *map(max, counts)) * width)) for _ in range(2))
    for k, part in enumerate(rows.split(outgoing)):
        messages[k, : part.numel()] = part.reshape(-1)
    pending = start_all_to_all(messages.view(-1), places.view(-1), axis, purpose, sent)

    def land() -> Tensor:
        places[axis.rank] = messages[axis.rank]
        for k, part in enumerate(received.split(incoming)):
            part.copy_(places[k, : part.numel()].view(part.shape))
        return received

    return pending.then(land)
