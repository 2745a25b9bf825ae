"""Generate the schedules: the order of computations on each rank.

There are p ranks, m micro-batches, and v stages (chunks) on each rank; r is a rank.

    gpipe         all forwards, then all backwards                       Huang et al. 2018, arXiv 1811.06965
    1f1b          p - 1 - r forwards, then one forward, one backward     Narayanan et al. 2021, arXiv 2104.04473, 2.2.1
    interleaved   1f1b with v stages on each rank, 1/v of its bubble     ibid. 2.2.2
    zb-h1         1f1b with backward split in two: the weights' part     Qi et al. 2023, arXiv 2401.10241, 2.3
                  fills the waits at the end
    zb-v          two stages on each rank, down the ranks and up again,  Qi et al. 2024, arXiv 2405.15362, 3
                  backward split in two

The tests of `simulate.py` compare the bubble and memory of each with the papers' formulas.

All schedules accept any m: interleaved and zb-v are generated for the next larger regular m, and the actions of
micro-batches that do not exist are removed, which keeps the order of all others.
"""

from collections.abc import Iterator
from itertools import zip_longest

from megazero.schedules.actions import Action, B, F, I, Kind, Schedule, W, passes


def gpipe(p: int, m: int) -> Schedule:
    """Return the schedule of all forwards, then all backwards."""
    ranks = tuple((*passes(r, F, range(m)), *passes(r, B, range(m))) for r in range(p))
    return Schedule("gpipe", m, tuple(range(p)), ranks)


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return the schedule that alternates one forward and one backward after a warm-up of forwards."""

    def rank(r: int) -> Iterator[Action]:
        ahead = min(p - 1 - r, m)
        yield from passes(r, F, range(ahead))
        for k in range(m - ahead):
            yield Action(r, F, ahead + k)
            yield Action(r, B, k)
        yield from passes(r, B, range(m - ahead, m))

    return Schedule("1f1b", m, tuple(range(p)), tuple(tuple(rank(r)) for r in range(p)))


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Return the schedule in which groups of p micro-batches go through the stages.

    A rank runs p micro-batches in its first chunk, then these p in its second chunk, and so on.
    """
    regular = -(-m // p) * p
    total = regular * v

    def nth(r: int, k: int, kind: Kind) -> Action:
        """Return the k-th forward of rank r, or its k-th backward, by `kind`; k counts from 0."""
        chunk = k // p % v
        chunk = chunk if kind is F else v - 1 - chunk
        return Action(chunk * p + r, kind, k // (p * v) * p + k % p)

    def rank(r: int) -> Iterator[Action]:
        ahead = min(2 * (p - 1 - r) + (v - 1) * p, total)
        yield from (nth(r, k, F) for k in range(ahead))
        for k in range(total - ahead):
            yield nth(r, ahead + k, F)
            yield nth(r, k, B)
        yield from (nth(r, k, B) for k in range(total - ahead, total))

    stages = tuple(stage % p for stage in range(p * v))
    return Schedule("interleaved", regular, stages, tuple(tuple(rank(r)) for r in range(p))).first(m)


def zb_h1(p: int, m: int) -> Schedule:
    """Return the schedule in which rank r delays the weights' part of backward by r micro-batches.

    Compared with rank 0 it has r fewer forwards in flight, so all ranks keep activations of equally many micro-batches.
    """

    def rank(r: int) -> Iterator[Action]:
        ahead = min(p - 1 - r, m)
        yield from passes(r, F, range(ahead))
        for k in range(m):
            if ahead + k < m:
                yield Action(r, F, ahead + k)
            yield Action(r, I, k)
            if k >= r:
                yield Action(r, W, k - r)
        yield from passes(r, W, range(max(m - r, 0), m))

    return Schedule("zb-h1", m, tuple(range(p)), tuple(tuple(rank(r)) for r in range(p)))


def zb_v(p: int, m: int) -> Schedule:
    """Return the schedule in which rank r has stages r and 2 p - 1 - r.

    So the first rank also computes the loss, and begins backward at once.
    """
    regular = max(m, 2 * p - 1)

    def rank(r: int) -> Iterator[Action]:
        down, up = r, 2 * p - 1 - r
        ahead = 2 * (p - r) - 1
        done = dict.fromkeys([(s, k) for s in (down, up) for k in (F, I, W)], 0)

        def do(stage: int, *kinds: Kind) -> Iterator[Action]:
            for kind in kinds:
                if done[stage, kind] < regular:
                    yield Action(stage, kind, done[stage, kind])
                    done[stage, kind] += 1

        for _ in range(ahead):
            yield from do(down, F)
        for _ in range(r):
            yield from (*do(up, F), *do(down, F))
        for _ in range(p - r):
            yield from do(up, F, I, W)
        while done[up, F] < regular or done[down, F] < regular:
            yield from (*do(down, F, I, W), *do(up, F, I, W))
        for _ in range(r):
            yield from (*do(down, I), *do(up, I))
        for _ in range(p - r):
            yield from do(down, I, W)
        rest = zip_longest(range(done[up, W], regular), range(done[down, W], regular))
        for upper, lower in rest:
            yield from (Action(s, W, k) for s, k in ((up, upper), (down, lower)) if k is not None)

    stages = (*range(p), *reversed(range(p)))
    return Schedule("zb-v", regular, stages, tuple(tuple(rank(r)) for r in range(p))).first(m)


def make(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Return the schedule of this name (`pipeline.schedule`)."""
    if name == "interleaved":
        return interleaved(ranks, micro_batches, chunks)
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v}[name](ranks, micro_batches)
