"""Compute the parts of a run from its stages: the options of each part, and the samples and tokens consumed before it.

A stage has an *effective config*: the config overridden by the stage's options. The run is a sequence of parts, one for
each stage and one after the last stage. Everything here is a function of the config and of the run's history
(`run/history.py`), the changes of options on resumes.
"""

from __future__ import annotations  # methods of `Course` return courses

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megazero.config.schema import Config, Stage
from megazero.config.sections import Source

SECTIONS = ("data", "model", "batch", "optimizer", "schedule")  # that a stage can have


def stage_ends(stages: Iterable[tuple[int | None, int | None, int]], step: int = 0, tokens: int = 0) -> Iterator[int]:
    """Yield the last step of each stage, from 1: `until_step`, or the first step that reaches `until_tokens`.

    Args:
        stages: (until_step, until_tokens, tokens of a step); one of the first two is None.
        step, tokens: steps done and tokens consumed before the first stage.
    """
    for until_step, until_tokens, each in stages:
        end = step + -(-max(0, (until_tokens or 0) - tokens) // each) if until_step is None else until_step
        yield end
        if end > step:
            step, tokens = end, tokens + (end - step) * each


def values_of_stages(values: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values that the stages of a flat config set for an option."""
    return [value for stage in values["stages"] or () if (value := _value(stage, key)) is not None]


def ends_of(values: Mapping[str, Any]) -> list[int]:
    """Return the last step of each stage of a flat config, from 1."""
    limits = []
    for stage in values["stages"] or ():
        rows, length = ((_value(stage, key) or values[key]) for key in ("batch.global", "model.seq_len"))
        limits.append((stage["until_step"], stage["until_tokens"], rows * length))
    return list(stage_ends(limits))


def _value(stage: Mapping[str, Any], key: str) -> Any:
    """Return the value that a stage sets for an option; None if it sets none."""
    section, _, name = key.partition(".")
    return (stage[section] or {}).get(name)


def effective(config: Config, stage: Stage | None) -> Config:
    """Return the effective config of a stage; with `stage` None, of the steps after the last stage."""
    changed: dict[str, Any] = {"stages": None}
    for section in SECTIONS if stage is not None else ():
        given = getattr(stage, section)
        if given is not None:
            changed[section] = getattr(config, section).model_copy(update=given.given())
    return config.model_copy(update=changed)


@dataclass(frozen=True)
class Part:
    """Consecutive steps of a run with one effective config.

    Attributes:
        name: of the stage, such as `stages[1]`; "" after the last stage or without stages.
        first: number of steps done before the part.
        end: last step of the part, from 1.
        config: the effective config.
        samples, tokens: consumed before the part.
    """

    name: str
    first: int
    end: int
    config: Config
    samples: int
    tokens: int

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens of a step."""
        return self.config.batch.global_ * self.seq_len

    @property
    def seq_len(self) -> int:
        """Return the number of tokens of a sequence."""
        return self.config.model.seq_len

    def samples_at(self, steps: int) -> int:
        """Return the samples consumed in the first `steps` steps of the run, which end in this part."""
        return self.samples + (steps - self.first) * self.config.batch.global_

    def tokens_at(self, steps: int) -> int:
        """Return the tokens consumed in the first `steps` steps of the run, which end in this part."""
        return self.tokens + (steps - self.first) * self.tokens_per_step


class Course:
    """The consecutive parts of a run.

    Args:
        config: resolved, with or without stages.
        history: changes of options on resumes, oldest first: {step, key, from, to}.

    Attributes:
        config, history: the arguments.
        parts: all parts from the first step to the last.
        after: the empty part with which a longer run would continue, as a 1-tuple; () if the last of `parts` would.
    """

    def __init__(self, config: Config, history: Sequence[Mapping[str, Any]] = ()):
        self.config, self.history = config, tuple(history)
        steps = sorted({change["step"] for change in history})
        configs = [config]
        for step in reversed(steps):
            configs.insert(0, _undone(configs[0], [change for change in history if change["step"] == step]))
        self._eras = list(zip([0, *steps], configs, strict=True))
        parts: list[Part] = []
        for (first, each), end in zip(self._eras, [*steps, config.run.steps], strict=True):
            _lay_out(parts, each, first, end, is_last=each is config)
        self.after = (parts.pop(),) if len(parts) > 1 and parts[-1].first == parts[-1].end else ()
        self.parts = tuple(parts)

    def part(self, done: int) -> Part:
        """Return the part of the step that follows `done` steps; the last part if the run is done."""
        return next((part for part in self.parts if done < part.end), self.parts[-1])

    def trained(self, done: int) -> Part:
        """Return the part of step `done`, counted from 1; the first part if `done` is 0."""
        return self.part(max(0, done - 1))

    def until(self, part: Part) -> int:
        """Return the last step, from 1, of `part` and the parts right after it that differ from it only in sources."""
        ends = [part.end]
        for later in self.parts[self.parts.index(part) + 1 :]:
            if _but_for_sources(later.config) != _but_for_sources(part.config):
                break
            ends.append(later.end)
        return ends[-1]

    def samples(self, steps: int) -> int:
        """Return the samples that the first `steps` steps consume, which is the id of the next sample."""
        return self._before(steps).samples_at(steps)

    def tokens(self, steps: int) -> int:
        """Return the tokens that the first `steps` steps consume."""
        return self._before(steps).tokens_at(steps)

    def sources(self) -> list[Source] | None:
        """Return the sources of the current config and its stages, one for each name; None if there are none."""
        stages = [effective(self.config, stage) for stage in self.config.stages or ()]
        given = [source for each in (self.config, *stages) for source in each.data.sources or ()]
        return list({source.name: source for source in given}.values()) if given else None

    def eras(self) -> list[tuple[int, Course]]:
        """Return (steps done before, course as planned then) for the start and for each change of options."""
        found = [(0, Course(self._eras[0][1]))]
        for first, config in self._eras[1:]:
            found.append((first, Course(config, [change for change in self.history if change["step"] <= first])))
        return found

    def _before(self, steps: int) -> Part:
        """Return the last part that begins after at most `steps` steps."""
        return next(part for part in reversed(self.parts) if part.first <= steps)


def _lay_out(parts: list[Part], config: Config, first: int, end: int, *, is_last: bool) -> None:
    """Append the parts of the steps after `first` up to `end`, which run with one config.

    Args:
        is_last: the config is the run's last one; always append its part after the last stage, even if empty.
    """

    def add(name: str, end: int, config: Config) -> None:
        parts.append(Part(name, first, end, config, *consumed))

    consumed = (parts[-1].samples_at(first), parts[-1].tokens_at(first)) if parts else (0, 0)
    configs = [(stage, effective(config, stage)) for stage in config.stages or ()]
    limits = ((s.until_step, s.until_tokens, each.batch.global_ * each.model.seq_len) for s, each in configs)
    for number, (stop, (_, each)) in enumerate(zip(stage_ends(limits, first, consumed[1]), configs, strict=True)):
        if stop > first and first < end:
            add(f"stages[{number}]", min(stop, end), each)
            first = min(stop, end)
            consumed = parts[-1].samples_at(first), parts[-1].tokens_at(first)
    if first < end or is_last:
        add("", end, effective(config, None))


def _but_for_sources(config: Config) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"sources": None, "train": None})})


def _undone(config: Config, changes: Sequence[Mapping[str, Any]]) -> Config:
    """Return the config from before `changes`: each changed option has its value `from`."""
    values = config.model_dump(by_alias=True, mode="json")
    for change in reversed(changes):  # of two changes of one option, the first has the original value
        *sections, last = change["key"].split(".")
        place = values
        for section in sections:
            place = place[section]
        if last in place and not isinstance(place[last], dict):  # the key "data" records changed files, not an option
            place[last] = change["from"]
    return type(config).model_validate_json(json.dumps(values))  # JSON mode accepts lists for tuples
