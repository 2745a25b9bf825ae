"""A step of few micro-batches stands for one of many: in every schedule that repeats, on every rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from megazero.schedules.actions import Action
from megazero.schedules.layers import cut, lowered
from megazero.schedules.repeat import Shortened, shortened, unshortened

LAYOUTS = [
    ("1f1b", 1, 1, 5),
    ("1f1b", 4, 1, 8),
    ("1f1b", 16, 1, 9),
    ("gpipe", 4, 1, 5),
    ("interleaved", 4, 2, 24),
    ("interleaved", 2, 3, 20),
    ("zb-h1", 4, 1, 12),
    ("zb-h1", 16, 1, 14),
    ("zb-v", 4, 2, 20),
]


def expanded(short: Shortened) -> list[Action]:
    """The longer step: every block as often as it is there, and micro-batches counted anew."""
    actions, at, newest = [], 0, max(action.micro_batch for action in short.originals)
    for block in short.blocks:
        copy = short.actions[block.first : block.last]
        assert kinds(copy) == kinds(short.actions[2 * block.first - block.last : block.first])
        assert kinds(copy) == kinds(short.actions[block.last : 2 * block.last - block.first])
        actions += [*short.actions[at : block.last], *block.times * copy]
        at = block.last
    actions += short.actions[at:]
    seen: Counter[tuple] = Counter()
    counted = []
    for number, action in enumerate(actions):
        kind = action.stage, action.kind
        is_last = number >= len(actions) - len(short.actions) + at and action.micro_batch == short.micro_batches - 1
        counted.append(replace(action, micro_batch=newest if is_last else seen[kind]))
        seen[kind] += 1
    return counted


def kinds(actions: Sequence[Action]) -> list[tuple]:
    return [(action.stage, action.kind) for action in actions]


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(("name", "ranks", "chunks", "most"), LAYOUTS)
def test_the_shorter_step_has_what_the_longer_one_does(
    name: str, ranks: int, chunks: int, most: int, each: bool
) -> None:
    layers, m = cut(name, ranks, chunks, 48, 1.0), 60
    schedule = lowered(layers, m, each=each, tied=True)
    for rank in range(ranks):
        whole = schedule.ranks[rank]
        short = shortened(whole, ranks)
        assert short.blocks and short.micro_batches <= most, f"rank {rank}: {short.micro_batches}"
        assert expanded(short) == list(whole)
        assert set(short.originals) <= set(whole)
        fewer = lowered(layers, short.micro_batches, each=each, tied=True).ranks[rank]
        assert Counter(short.actions) == Counter(fewer), "each micro-batch is done once"
        last = short.micro_batches - 1  # which is not like the others
        assert last not in {action.micro_batch for b in short.blocks for action in short.actions[b.first : b.last]}


def test_as_many_micro_batches_as_ranks_need_few() -> None:
    """Those that are under way at once repeat, too: 1T on 1,024 ranks."""
    layers = cut("1f1b", 64, 1, 128, 1.0)
    schedule = lowered(layers, 200, each=False, tied=True)
    assert [shortened(schedule.ranks[rank], 64).micro_batches for rank in (0, 31, 63)] == [8, 9, 5]


def test_a_step_that_is_short_anyway_is_left_whole() -> None:
    layers = cut("1f1b", 4, 1, 24, 1.0)
    whole = lowered(layers, 4, each=False, tied=False).ranks[0]
    assert shortened(whole, 4) == unshortened(whole)


def test_a_step_that_differs_in_one_place_is_done_there() -> None:
    layers = cut("1f1b", 2, 1, 24, 1.0)
    schedule = cache(lambda micro_batches: lowered(layers, micro_batches, each=False, tied=False))
    actions = list(schedule(60).ranks[0])
    place = next(n for n, action in enumerate(actions) if str(action) == "0B30")
    actions[place - 1], actions[place] = actions[place], actions[place - 1]
    short = shortened(actions, 2)
    assert expanded(short) == actions and actions[place] in short.originals and len(short.blocks) == 2
