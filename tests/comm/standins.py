"""NCCL without a GPU: groups that note what is called, and hosts that wait at a communicator's first use."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megazero.comm.fake_group import FakeProcessGroup

Use = tuple[tuple[int, ...], int]  # of a communicator: its ranks, and its number among those of the same ranks


class NotedGroup(FakeProcessGroup):
    """A group of a pretended world; every operation completes at once and is noted as a use of its communicator."""

    def __init__(self, rank: int, name: Use, uses: list[tuple[str, Use]]):
        super().__init__(name[0].index(rank), len(name[0]))
        self._name, self._uses = name, uses

    def _noted(self, what: str, work: dist.Work) -> dist.Work:
        self._uses.append((what, self._name))
        return work

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> dist.Work:
        return self._noted("all_reduce", super().allreduce(tensors))

    def allgather(self, wholes: Sequence[Any], parts: Sequence[Tensor], *options: Any) -> dist.Work:
        return self._noted("all_gather", super().allreduce(parts))

    def reduce_scatter(self, outs: Sequence[Tensor], parts: Sequence[Any], *options: Any) -> dist.Work:
        return self._noted("reduce_scatter", super().allreduce(outs))

    def send(self, tensors: Sequence[Tensor], *target: Any) -> dist.Work:
        return self._noted("send", super().send(tensors))

    def recv(self, tensors: Sequence[Tensor], *source: Any) -> dist.Work:
        return self._noted("recv", super().recv(tensors))


class NotedSlot:
    """A status slot that records its calls."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, list[int], str]] = []

    def begin(self, axis: str, ranks: range, text: str) -> int:
        self.begun.append((axis, list(ranks), text))
        return 1

    def end(self, axis: str) -> None:
        self.begun.append((axis, [], "end"))


class Splits:
    """`CommContext.split_group` of one rank of a pretended world.

    Attributes:
        calls: the lists of ranks, and whether they get few multiprocessors: the same on every rank.
        own: the communicators of this rank.
        uses: of them, in order.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.calls: list[tuple[list[list[int]], bool]] = []
        self.own: list[Use] = []
        self.uses: list[tuple[str, Use]] = []

    def __call__(
        self, *, split_ranks: list[list[int]], timeout: object, name: str, few_ctas: bool = False
    ) -> dist.ProcessGroup | None:
        several = [rank for ranks in split_ranks for rank in ranks]
        assert len(several) == len(set(several)), f"one rank in two groups of a split: {split_ranks}"
        assert all(ranks == sorted(ranks) for ranks in split_ranks), split_ranks
        self.calls.append((split_ranks, few_ctas))
        mine = next((tuple(ranks) for ranks in split_ranks if self.rank in ranks), None)
        if mine is None:
            return None
        self.own.append((mine, sum(ranks == mine for ranks, _ in self.own)))
        return NotedGroup(self.rank, self.own[-1], self.uses)


def all_connect(orders: Sequence[Iterable[Use]]) -> bool:
    """Return whether all hosts come through their first uses, each of which waits until all its ranks have come."""
    left = [list(order) for order in orders]
    moved = True
    while moved:
        moved = False
        for use in {order[0] for order in left if order}:
            if all(left[rank][:1] == [use] for rank in use[0]):
                for rank in use[0]:
                    del left[rank][0]
                moved = True
    return not any(left)
