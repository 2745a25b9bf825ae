"""A step of few micro-batches stands for one of many: in every schedule that repeats, on every rank."""

from functools import cache

import pytest

from megazero.schedules.actions import Action, Kind
from megazero.schedules.layers import cut, lowered
from megazero.schedules.repeat import shortened

LAYOUTS = [
    ("1f1b", 1, 1),
    ("1f1b", 4, 1),
    ("interleaved", 4, 2),
    ("interleaved", 2, 3),
    ("zb-h1", 4, 1),
    ("zb-v", 4, 2),
]


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(("name", "ranks", "chunks"), LAYOUTS)
def test_the_shorter_step_has_what_the_longer_one_does(name: str, ranks: int, chunks: int, each: bool) -> None:
    layers, m = cut(name, ranks, chunks, 24, 1.0), 60
    schedule = cache(lambda micro_batches: lowered(layers, micro_batches, each=each, tied=True))
    for rank in range(ranks):
        short = shortened(lambda micro_batches, rank=rank: schedule(micro_batches).ranks[rank], m, ranks)
        assert short is not None and short.micro_batches <= 7 * ranks
        few, many = schedule(short.micro_batches).ranks[rank], schedule(m).ranks[rank]
        block = few[short.first : short.last]
        assert len(few) + short.times * len(block) == len(many)
        kinds = [(action.stage, action.kind) for action in block]
        assert kinds == [(a.stage, a.kind) for a in few[2 * short.first - short.last : short.first]]
        ends = {short.micro_batches - 1}  # the last micro-batch is not like the others
        assert not ends & {action.micro_batch for action in few[: short.last]}
        for kind in Kind:
            for stage in range(len(layers.parts)):
                there = [sum((a.stage, a.kind) == (stage, kind) for a in actions) for actions in (few, block, many)]
                assert there[0] + short.times * there[1] == there[2]


def test_a_step_whose_actions_do_not_repeat_is_left_whole() -> None:
    layers = cut("gpipe", 4, 1, 24, 1.0)
    schedule = cache(lambda micro_batches: lowered(layers, micro_batches, each=False, tied=False))
    assert shortened(lambda m: schedule(m).ranks[0], 60, 4) is None  # all forwards, then all backwards: two blocks
    assert shortened(lambda m: schedule(m).ranks[0], 4, 4) is None  # short anyway


def test_a_step_that_differs_in_one_place_is_left_whole() -> None:
    layers = cut("1f1b", 2, 1, 24, 1.0)
    schedule = cache(lambda micro_batches: lowered(layers, micro_batches, each=False, tied=False))

    def odd(micro_batches: int) -> list[Action]:
        actions = list(schedule(micro_batches).ranks[0])
        if micro_batches == 60:
            actions[100], actions[101] = actions[101], actions[100]
        return actions

    assert shortened(lambda m: schedule(m).ranks[0], 60, 2) is not None
    assert shortened(odd, 60, 2) is None
