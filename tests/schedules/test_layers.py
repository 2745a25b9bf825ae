"""Cuts: every part once, the busiest rank's work as small as possible."""

from itertools import product

import pytest

from megazero.schedules.layers import split


def work(cuts: list[range], rank_of: tuple[int, ...], blocks: int, head: float) -> list[float]:
    costs = [0.0, *[1.0] * blocks, head]
    return [
        sum(costs[i] for cut, rank in zip(cuts, rank_of, strict=True) if rank == r for i in cut)
        for r in range(max(rank_of) + 1)
    ]


@pytest.mark.parametrize("rank_of", [(0,), (0, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0)])
@pytest.mark.parametrize("head", [0.0, 0.4, 1.23, 3.7])
def test_no_other_cut_is_better(rank_of: tuple[int, ...], head: float) -> None:
    stages = len(rank_of)
    for blocks in range(stages, stages + 5):
        cuts = split(blocks, rank_of, head)
        assert [i for cut in cuts for i in cut] == list(range(blocks + 2))
        assert all(any(1 <= i <= blocks for i in cut) for cut in cuts)
        best = min(
            max(work(_cuts(counts, blocks), rank_of, blocks, head))
            for counts in product(range(1, blocks + 1), repeat=stages)
            if sum(counts) == blocks
        )
        assert max(work(cuts, rank_of, blocks, head)) == pytest.approx(best)


def _cuts(counts: tuple[int, ...], blocks: int) -> list[range]:
    firsts = [1 + sum(counts[:k]) for k in range(len(counts))]
    cuts = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    cuts[0] = range(cuts[0].stop)
    cuts[-1] = range(cuts[-1].start, blocks + 2)
    return cuts


def test_a_head_that_costs_a_block_is_counted() -> None:
    assert split(7, (0, 1), 1.23) == [range(5), range(5, 9)]
    assert split(7, (0, 1, 0, 1), 1.23) == [range(3), range(3, 5), range(5, 7), range(7, 9)]
    assert split(8, (0, 1, 2, 3), 0.0) == [range(3), range(3, 5), range(5, 7), range(7, 10)]
