"""The course of a run by hand: what holds in which step, and what was consumed before, with stages and a history."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megazero.config.file import load
from megazero.config.schema import Config
from megazero.config.stages import Course

BASE = ("batch.global=8", "batch.micro=1", "model.position=rotary", "model.seq_len=32", "run.steps=10")
STAGES = "stages=[{until_step: 2, batch: {global: 2}}, {until_tokens: 513, batch: {global: 4, micro: 2}, optimizer: "
STAGES += "{betas: [0.8, 0.9]}}, {until_step: 8, model: {seq_len: 64}, schedule: {decay: constant}}]"


def by_hand(config: Config, steps: int, batch_of: Any) -> list[tuple[int, int]]:
    """(samples, tokens) before each step, added up."""
    found, samples, tokens = [], 0, 0
    for step in range(steps):
        found.append((samples, tokens))
        batch, length = batch_of(step)
        samples, tokens = samples + batch, tokens + batch * length
    return found


def test_parts_of_a_run() -> None:
    config = load("tiny", [*BASE, STAGES])
    course = Course(config)
    rows = [(part.name, part.first, part.end, part.config.batch.global_, part.seq_len) for part in course.parts]
    # 2 steps of 64 tokens, then 4 of 128: behind three of them there are 512, behind four the 513
    expected = [("stages[0]", 0, 2, 2, 32), ("stages[1]", 2, 6, 4, 32), ("stages[2]", 6, 8, 8, 64), ("", 8, 10, 8, 32)]
    assert rows == expected

    def batch_of(step: int) -> tuple[int, int]:
        return next((batch, length) for _, first, end, batch, length in rows if first <= step < end)

    found = by_hand(config, 10, batch_of)
    assert [(course.samples(step), course.tokens(step)) for step in range(10)] == found
    for step in range(10):
        assert course.part(step).first <= step < course.part(step).end
    assert [course.trained(done).name for done in (0, 2, 3, 6, 10)] == [rows[n][0] for n in (0, 0, 1, 1, 3)]
    assert course.parts[1].config.optimizer.betas == (0.8, 0.9)
    assert (course.parts[2].config.schedule.decay, course.parts[3].config.schedule.decay) == ("constant", "cosine")


def test_stages_that_change_what_is_trained_on_alone_are_trained_in_one_go() -> None:
    stages = "stages=[{until_step: 3, data: {sources: [{path: b}]}}, {until_step: 5}, {until_step: 10, data: {sources: "
    stages += "[{path: a}]}}]"
    course = Course(load("tiny", ["run.steps=10", "data.train=null", "data.sources=[{path: a}, {path: c}]", stages]))
    parts = (*course.parts, *course.after)
    mixes = [(part.first, [source.name for source in part.config.data.sources or ()]) for part in parts]
    assert mixes == [(0, ["b"]), (3, ["a", "c"]), (5, ["a"]), (10, ["a", "c"])]
    assert [course.until(part) for part in course.parts] == [10, 10, 10]


def test_a_history_is_what_the_config_was_before() -> None:
    config = load("tiny", [*BASE])
    history = [
        {"step": 3, "key": "batch.global", "from": 2, "to": 4},
        {"step": 5, "key": "data", "from": "one", "to": "another"},
        {"step": 5, "key": "batch.global", "from": 4, "to": 8},
        {"step": 5, "key": "data.sources", "from": [{"path": "a", "name": "a", "weight": 1.0}], "to": None},
    ]
    course = Course(config, history)
    assert [(p.first, p.end, p.samples, p.config.batch.global_) for p in course.parts] == [
        (0, 3, 0, 2),
        (3, 5, 6, 4),
        (5, 10, 14, 8),
    ]
    assert [source.name for source in course.parts[0].config.data.sources or ()] == ["a"]
    assert course.parts[2].config.data.sources is None and course.sources() is None
    firsts, eras = zip(*course.eras(), strict=True)
    assert firsts == (0, 3, 5)
    assert [era.parts[-1].config.batch.global_ for era in eras] == [2, 4, 8]
    assert [era.samples(5) for era in eras] == [10, 14, 14]


def test_tokens_of_a_stage_count_those_before_a_change() -> None:
    """Three steps of 2 sequences were done when it became 4: 192 tokens; the stage has 448, and two steps more."""
    config = load("tiny", [*BASE, "batch.global=4", "stages=[{until_tokens: 448, optimizer: {lr: 5e-4}}]"])
    course = Course(config, [{"step": 3, "key": "batch.global", "from": 2, "to": 4}])
    assert [(part.first, part.end, part.config.optimizer.lr) for part in course.parts][1:] == [
        (3, 5, 5e-4),
        (5, 10, config.optimizer.lr),
    ]


@given(
    ends=st.lists(st.integers(1, 30), min_size=1, max_size=5, unique=True).map(sorted),
    batches=st.lists(st.sampled_from([1, 2, 4, 6]), min_size=6, max_size=6),
    lengths=st.lists(st.sampled_from([8, 16, 24]), min_size=6, max_size=6),
)
def test_prefix_sums(ends: list[int], batches: list[int], lengths: list[int]) -> None:
    base = load("tiny", ["model.position=rotary", f"run.steps={ends[-1] + 3}", "batch.micro=1"]).model_dump(
        by_alias=True
    )
    base["batch"]["global"], base["model"]["seq_len"] = batches[-1], lengths[-1]
    base["stages"] = tuple(
        {"until_step": end, "batch": {"global": batch}, "model": {"seq_len": length}}
        for end, batch, length in zip(ends, batches, lengths, strict=False)
    )
    course = Course(Config.model_validate(base))
    places = [next((n for n, end in enumerate(ends) if step < end), -1) for step in range(ends[-1] + 3)]
    found = by_hand(course.config, ends[-1] + 3, lambda step: (batches[places[step]], lengths[places[step]]))
    assert [(course.samples(step), course.tokens(step)) for step in range(ends[-1] + 3)] == found
