"""Cuts: every part once, the busiest rank's work as small as possible."""

from itertools import product

import pytest

from megazero.schedules.layers import split


def work(cuts: list[range], rank_of: tuple[int, ...], blocks: list[float], head: float) -> list[float]:
    costs = [0.0, *blocks, head]
    return [
        sum(costs[i] for cut, rank in zip(cuts, rank_of, strict=True) if rank == r for i in cut)
        for r in range(max(rank_of) + 1)
    ]


def best(rank_of: tuple[int, ...], blocks: list[float], head: float) -> float:
    """The least work of the busiest rank, over all cuts."""
    counts = product(range(1, len(blocks) + 1), repeat=len(rank_of))
    return min(
        max(work(_cuts(each, len(blocks)), rank_of, blocks, head)) for each in counts if sum(each) == len(blocks)
    )


ONE_STAGE = [(0,), (0, 1), (0, 1, 2, 3)]
SEVERAL = [(0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0)]


@pytest.mark.parametrize("rank_of", [*ONE_STAGE, *SEVERAL])
@pytest.mark.parametrize("head", [0.0, 0.4, 1.23, 3.7])
def test_no_other_cut_is_better(rank_of: tuple[int, ...], head: float) -> None:
    stages = len(rank_of)
    for count in range(stages, stages + 5):
        blocks = [1.0] * count
        cuts = split(blocks, rank_of, head)
        assert [i for cut in cuts for i in cut] == list(range(count + 2))
        assert all(any(1 <= i <= count for i in cut) for cut in cuts)
        assert max(work(cuts, rank_of, blocks, head)) == pytest.approx(best(rank_of, blocks, head))


@pytest.mark.parametrize("rank_of", ONE_STAGE)
@pytest.mark.parametrize("head", [0.0, 0.4, 3.7])
@pytest.mark.parametrize("pattern", [(1.0, 3.0), (1.0, 1.0, 1.0, 2.5), (2.0, 0.5, 0.5)], ids=str)
def test_no_other_cut_of_unequal_blocks_is_better(
    rank_of: tuple[int, ...], head: float, pattern: tuple[float, ...]
) -> None:
    for count in range(len(rank_of), len(rank_of) + 6):
        blocks = [pattern[i % len(pattern)] for i in range(count)]
        cuts = split(blocks, rank_of, head)
        assert [i for cut in cuts for i in cut] == list(range(count + 2))
        assert max(work(cuts, rank_of, blocks, head)) == pytest.approx(best(rank_of, blocks, head))


@pytest.mark.parametrize("rank_of", SEVERAL)
def test_unequal_blocks_in_several_stages_of_a_rank(rank_of: tuple[int, ...]) -> None:
    """The busiest rank has at most one block more than in the best cut."""
    for head, count in product((0.0, 1.23), range(len(rank_of), len(rank_of) + 5)):
        blocks = [(1.0, 1.0, 2.5)[i % 3] for i in range(count)]
        cuts = split(blocks, rank_of, head)
        assert [i for cut in cuts for i in cut] == list(range(count + 2))
        assert max(work(cuts, rank_of, blocks, head)) <= best(rank_of, blocks, head) + 2.5


@pytest.mark.parametrize("rank_of", [(0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)])
def test_nearly_equal_blocks_are_dealt(rank_of: tuple[int, ...]) -> None:
    blocks = [1.0, 1.0, 1.0, 1.03] * 8
    assert max(work(split(blocks, rank_of, 4.0), rank_of, blocks, 4.0)) <= 1.02 * (sum(blocks) + 4.0) / 4


def _cuts(counts: tuple[int, ...], blocks: int) -> list[range]:
    firsts = [1 + sum(counts[:k]) for k in range(len(counts))]
    cuts = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    cuts[0] = range(cuts[0].stop)
    cuts[-1] = range(cuts[-1].start, blocks + 2)
    return cuts


def test_a_head_that_costs_a_block_is_counted() -> None:
    assert split([1.0] * 7, (0, 1), 1.23) == [range(5), range(5, 9)]
    assert split([1.0] * 7, (0, 1, 0, 1), 1.23) == [range(3), range(3, 5), range(5, 7), range(7, 9)]
    assert split([1.0] * 8, (0, 1, 2, 3), 0.0) == [range(3), range(3, 5), range(5, 7), range(7, 10)]
