"""Lay the stages of a run out over its steps: which options hold in which, and what was consumed before.

A stage has an *effective config*: the config with the stage's options put over it. Steps in which it is the same but
for what is trained on are a part of the run: nothing is built anew within one. All of it is a function of the config,
and of the run's history (`run/history.py`): what a change of options on a resume has put behind, or before, a step.
"""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megazero.config.schema import Config
    from megazero.config.sections import Source
    from megazero.config.stage_sections import Stage

SECTIONS = ("data", "model", "batch", "optimizer", "schedule")  # of a stage


def stage_ends(stages: Iterable[tuple[int | None, int | None, int]], step: int = 0, tokens: int = 0) -> Iterator[int]:
    """Yield the last step of each stage, from 1: the first one with which its tokens are trained on, if it has those.

    Args:
        stages: until_step, until_tokens (one of the two), tokens of a step.
        step, tokens: done and trained on before the first.
    """
    for until_step, until_tokens, each in stages:
        end = step + -(-max(0, (until_tokens or 0) - tokens) // each) if until_step is None else until_step
        yield end
        if end > step:
            step, tokens = end, tokens + (end - step) * each


def values_of_stages(values: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values that the stages of a flat config give an option."""
    return [value for stage in values["stages"] or () if (value := _value(stage, key)) is not None]


def ends_of(values: Mapping[str, Any]) -> list[int]:
    """Return the last step of each stage of a flat config, from 1."""

    def held(stage: Mapping[str, Any], key: str) -> Any:
        value = _value(stage, key)
        return values[key] if value is None else value

    return list(
        stage_ends(
            (stage["until_step"], stage["until_tokens"], held(stage, "batch.global") * held(stage, "model.seq_len"))
            for stage in values["stages"] or ()
        )
    )


def _value(stage: Mapping[str, Any], key: str) -> Any:
    """Return the value that a stage gives an option; None: none."""
    section, _, name = key.partition(".")
    return (stage[section] or {}).get(name)


def effective(config: Config, stage: Stage | None) -> Config:
    """Return the config that holds in a stage; None: behind the last one."""
    changed: dict[str, Any] = {"stages": None}
    for section in SECTIONS if stage is not None else ():
        given = getattr(stage, section)
        if given is not None:
            values = {name: getattr(given, name) for name in type(given).model_fields}
            values = {name: value for name, value in values.items() if value is not None}
            changed[section] = getattr(config, section).model_copy(update=values)
    return config.model_copy(update=changed)


@dataclass(frozen=True)
class Mix:
    """The sources that are trained on from a step on.

    Attributes:
        first: steps done before.
        sources: by their names; None: the one of `data.train`.
    """

    first: int
    sources: tuple[Source, ...] | None


@dataclass(frozen=True)
class Part:
    """Steps of a run in which nothing changes but what is trained on.

    Attributes:
        name: of the stage with which it begins: `stages[1]`; "": it begins behind the last one, or there are none.
        first: steps done before it.
        end: its last step, from 1.
        config: that holds in it.
        samples, tokens: consumed before it.
        mixes: what is trained on, at least one.
    """

    name: str
    first: int
    end: int
    config: Config
    samples: int
    tokens: int
    mixes: tuple[Mix, ...]

    @property
    def tokens_per_step(self) -> int:
        return tokens_per_step(self.config)

    @property
    def seq_len(self) -> int:
        return self.config.model.seq_len


class Course:
    """The course of a run: its parts, one after the other.

    Args:
        config: resolved, with stages or without.
        history: changes of its options when it went on, oldest first: {step, key, from, to}.

    Attributes:
        config, history: the same.
        parts: from the first step to the last.
        behind: the part of no steps with which the run would go on if it were longer, where that is not its last one.
    """

    def __init__(self, config: Config, history: Sequence[Mapping[str, Any]] = ()):
        self.config, self.history = config, tuple(history)
        steps = sorted({change["step"] for change in history})
        configs = [config]
        for step in reversed(steps):
            configs.insert(0, _undone(configs[0], [change for change in history if change["step"] == step]))
        self._configs, self._firsts = configs, [0, *steps]
        parts: list[Part] = []
        for first, each, end in zip(self._firsts, configs, [*steps, None], strict=True):
            _lay_out(parts, each, first, config.run.steps if end is None else end, last=end is None)
        longer = len(parts) > 1 and parts[-1].first == parts[-1].end
        self.behind = (parts.pop(),) if longer else ()
        self.parts = tuple(parts)

    def part(self, done: int) -> Part:
        """Return the part of the step behind so many; of the last one, where the run is done."""
        return next((part for part in self.parts if done < part.end), self.parts[-1])

    def trained(self, done: int) -> Part:
        """Return the part of the last of so many steps; the first part where none is done."""
        return self.part(max(0, done - 1))

    def samples(self, steps: int) -> int:
        """Return how many samples that many steps consume: the id of the next one."""
        part = self._before(steps)
        return part.samples + (steps - part.first) * part.config.batch.global_

    def tokens(self, steps: int) -> int:
        """Return how many tokens that many steps consume."""
        part = self._before(steps)
        return part.tokens + (steps - part.first) * part.tokens_per_step

    def step_of(self, sample: int) -> int:
        """Return the step, from 1, of a sample."""
        part = [part for part in self.parts if part.samples <= sample][-1]
        return part.first + (sample - part.samples) // part.config.batch.global_ + 1

    def sources(self) -> list[Source] | None:
        """Return every source of the config as it is and of its stages, by name; None: it has `data.train`."""
        return all_sources(self.config)

    def eras(self) -> list[tuple[int, Course]]:
        """Return each time from one change of options to the next: the steps done before, and the course as it was."""
        found = []
        for first, config in zip(self._firsts, self._configs, strict=True):
            earlier = [change for change in self.history if change["step"] <= first] if found else []
            found.append((first, Course(config, earlier)))
        return found

    def _before(self, steps: int) -> Part:
        """Return the last part that has begun when so many steps are done."""
        return next(part for part in reversed(self.parts) if part.first <= steps)


def all_sources(config: Config) -> list[Source] | None:
    """Return every source of a config and of its stages, by name; None: it has `data.train`."""
    mixes = [config.data.sources] + [_sources_of(stage) for stage in config.stages or ()]
    given = [source for mix in mixes for source in mix or ()]
    return list({source.name: source for source in given}.values()) if given else None


def tokens_per_step(config: Config) -> int:
    return config.batch.global_ * config.model.seq_len


def _lay_out(parts: list[Part], config: Config, first: int, end: int, *, last: bool) -> None:
    """Add the parts of the steps from `first` to `end` in which a config holds.

    Args:
        last: it holds to the end of the run, and beyond: that has a part too, of no steps.
    """
    tokens = parts[-1].tokens + (first - parts[-1].first) * parts[-1].tokens_per_step if parts else 0
    stages = list(config.stages or ())
    configs = [effective(config, stage) for stage in stages]
    limits = ((s.until_step, s.until_tokens, tokens_per_step(c)) for s, c in zip(stages, configs, strict=True))
    for number, (stop, each) in enumerate(zip(stage_ends(limits, first, tokens), configs, strict=True)):
        if stop > first and first < end:
            _add(parts, f"stages[{number}]", first, min(stop, end), each)
            first = min(stop, end)
    if first < end or last:
        _add(parts, "", first, end, effective(config, None))


def _add(parts: list[Part], name: str, first: int, end: int, config: Config) -> None:
    """Add steps: to the last part, where they differ from it only in their sources."""
    before = parts[-1] if parts else None
    mix = Mix(first, config.data.sources)
    if before is not None and _but_for_sources(before.config) == _but_for_sources(config):
        mixes = before.mixes if before.mixes[-1].sources == mix.sources else (*before.mixes, mix)
        parts[-1] = replace(before, end=end, mixes=mixes)
    else:
        steps = first - before.first if before else 0
        samples = before.samples + steps * before.config.batch.global_ if before else 0
        tokens = before.tokens + steps * before.tokens_per_step if before else 0
        parts.append(Part(name, first, end, config, samples, tokens, (mix,)))


def _but_for_sources(config: Config) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"sources": None, "train": None})})


def _sources_of(stage: Stage) -> tuple[Source, ...] | None:
    return stage.data.sources if stage.data else None


def _undone(config: Config, changes: Sequence[Mapping[str, Any]]) -> Config:
    """Return a config as it was before some changes."""
    values = config.model_dump(by_alias=True)
    for change in reversed(changes):  # of two of an option the first one holds what was before both
        *sections, last = change["key"].split(".")
        place = values
        for section in sections:
            place = place[section]
        if last in place and not isinstance(place[last], dict):  # "data" stands for files that are others
            place[last] = _tuples(change["from"])
    return type(config).model_validate(values)


def _tuples(value: Any) -> Any:
    """Return a value of JSON as a config takes it: with tuples for lists, at any depth."""
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
