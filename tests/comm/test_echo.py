"""A group of two ranks of which one is here: its own parts come back, by copies or by operations of another group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.collectives import all_reduce, start_all_gather_in_place, start_reduce_scatter
from megazero.comm.fake_group import FakeProcessGroup
from scripts.gpu_check.echo import echoing


class Alone(FakeProcessGroup):
    """A group of one rank that does what NCCL does there, and notes it."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.calls: list[tuple[str, int]] = []

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> dist.Work:
        self.calls.append(("all_reduce", tensors[0].numel()))
        return super().allreduce(tensors)

    def all_gather_single(self, whole: Tensor, part: Tensor, *options: Any) -> dist.Work:
        self.calls.append(("all_gather", part.numel()))
        whole.copy_(part)
        return super().all_gather_single(whole, part)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, *options: Any) -> dist.Work:
        self.calls.append(("reduce_scatter", x.numel()))
        out.copy_(x)
        return super().reduce_scatter_single(out, x)

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


def exchanged(inner: Alone | None) -> list[list[float]]:
    axis = echoing(inner)["data"]
    whole = torch.tensor([1.0, 2.0, -1.0, -1.0])
    x, into = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(2)
    found = [start_all_gather_in_place(whole, axis, "gather").wait().clone()]
    found.append(start_reduce_scatter(x.clone(), axis, "gradients").wait())
    found.append(start_reduce_scatter(x, axis, "gradients", out=into, accumulate=True).wait())
    return [y.tolist() for y in (*found, all_reduce(x, axis, "norm"))]


def test_an_echo_gives_back_what_was_sent() -> None:
    expected = [[1.0, 2.0, 1.0, 2.0], [1.0, 2.0], [2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]
    assert exchanged(None) == expected
    inner = Alone()
    assert exchanged(inner) == expected
    assert inner.calls == [("all_gather", 2), ("reduce_scatter", 2), ("reduce_scatter", 2), ("all_reduce", 4)]


def test_a_pipeline_s_messages_are_zeros() -> None:
    axis = echoing(None, pipeline=2)["pipeline"]
    x = torch.ones(3)
    assert axis.group is not None
    axis.group.recv([x], 1, 0).wait()
    assert x.tolist() == [0.0, 0.0, 0.0]
