"""Read a YAML file and overrides into a checked `Config`, or raise errors that name each fault and its place.

    load("gpt13b", ["run.steps=50"])
    load("gpt13b", ["c4.yaml", "zero.stage=1"])

A bare name is looked up in the current folder, then in configs/; one among the overrides in configs/over/ before that.
Its sections override earlier values key by key. Every error gives the file and line, or names the command line.
Does not import torch.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError

from megazero.base.errors import FaultList, UserError
from megazero.base.reading import exists, looked_up, read_file
from megazero.base.yaml_text import MOST_BYTES, parse_yaml
from megazero.config import rules
from megazero.config.flat import flatten, option_keys, spelt
from megazero.config.model import LayerKind, QueryScale, Rope
from megazero.config.nearest import nearest, sections_of
from megazero.config.permitted import refusal
from megazero.config.schema import Config, resolved
from megazero.config.sections import Section
from megazero.config.stages import effective

# Removed options, with advice. A run's config.yaml from an earlier version may have them, unset.
_GONE = {
    "tile_mb": "split large weights over ranks with parallel.tensor",
    "grows": "name a folder of finished shards",
    "table": "set observe.profile to a step",
}
# Options whose values are mappings: the sections that these consist of.
_MAPPINGS: Mapping[str, tuple[type[Section], ...]] = MappingProxyType(
    {"model.layer_kinds": (LayerKind, Rope), "model.query_scale": (QueryScale,)}
)
_COMMAND_LINE = "command line"  # the place of an override
_DEEPEST = 5  # dots in a key; options have at most two
CONFIGS = Path(__file__).resolve().parents[1] / "configs"  # in a checkout, a link to the top-level folder


@dataclass
class _Source:
    """The options as given: nested values, and the place where each dotted key was given."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def locate(self, key: str) -> str:
        """Return the place where `key` or its nearest enclosing section was given."""
        while key and key not in self.where:
            key = key.rpartition(".")[0]
        return self.where.get(key, self.name)


def load(name_or_path: str, overrides: list[str] | None = None) -> Config:
    """Return the resolved config of a file with overrides applied.

    Raises:
        UserError: 101 file not found, 102 not YAML, 103 duplicate key, 104 unknown key, 105 wrong value,
            106 broken relation, 107 options that exclude each other, 108 malformed override.
    """
    path = find(name_or_path)
    source = _Source(path.name)
    _read(path, source)
    for override in overrides or []:
        if is_file_name(override):
            over = _Source(source.name)
            _read(find(override, CONFIGS / "over", CONFIGS), over)
            _lay_over(source.values, over.values)
            source.where |= over.where
        else:
            _override(override, source)
    return _checked(source)


def of_values(values: dict[str, Any], name: str) -> Config:
    """Return the resolved config of nested options, called `name` in errors. Raises UserError as `load`, 104 to 107."""
    return _checked(_Source(name, values))


def _checked(source: _Source) -> Config:
    try:
        config = resolved(Config.model_validate(source.values))
    except ValidationError as error:
        raise FaultList(sorted(_faults(error, source).values(), key=lambda fault: fault.code)) from None
    if broken := list(_violations(config, source)):
        raise FaultList(broken)
    return config


def is_file_name(override: str) -> bool:
    """Return True if an override is the name of a YAML file and not `section.key=value`."""
    return override.endswith(".yaml") and "=" not in override


def find(name_or_path: str, *folders: Path) -> Path:
    """Return the file of a name or path. A bare name (.yaml is optional) may also be in `folders`, by default configs/.

    The current folder comes first. Raises UserError 101: there is no such file, or it is not a regular file.
    """
    given = Path(name_or_path)
    names = (given.name, f"{given.name}.yaml")
    places = (Path(), *(folders or (CONFIGS,)))
    candidates = [given] if given.parent != Path() else [f / name for f in places for name in names]
    for candidate in candidates:
        if exists(candidate) and candidate.is_file():
            return candidate
    if exists(given):
        raise UserError(101, "is not a regular file", "give a YAML file, or a shipped config", where=name_or_path)
    near = difflib.get_close_matches(given.stem, shipped(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped configs: {', '.join(shipped())}"
    where = looked_up(given) if given.parent != Path() else ""  # a bare name is looked up in configs/ too
    raise UserError(101, f"no such config{where}", hint, where=name_or_path)


def shipped() -> list[str]:
    """Return the names of the configs that are part of megazero."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def name_of(name_or_path: str) -> str:
    """Return the name of a config: its file's name, or for a run's config.yaml the name of the run's folder."""
    path = find(name_or_path)
    return path.stem if path.name != "config.yaml" else path.resolve().parent.name or path.stem


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> None:
    """Merge `above` into `below`: sections key by key, other values replaced."""
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay_over(below[key], value)
        else:
            below[key] = value


def _read(path: Path, source: _Source) -> None:
    try:
        tree = parse_yaml(read_file(path, MOST_BYTES).decode(), keeps_places=True)
    except OSError as error:
        raise UserError(102, f"cannot be read: {error.strerror}", "see its permissions", where=path.name) from None
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1
        what = str(error.problem).split(" with value")[0].replace("found duplicate key", "duplicate key")
        raise UserError(103, what, "remove one of the two", where=f"{path.name}:{line}") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        what, do = f"not YAML: {error.problem or error.context}", "check quotes, brackets and indentation (no tabs)"
        raise UserError(102, what, do, where=f"{path.name}{line}") from None
    except Exception as error:  # ruamel does not wrap Python's errors: a 13th month, 5,000 digits, invalid UTF-8 ...
        what = str(error) or type(error).__name__
        raise UserError(102, f"cannot be read: {what}", "correct the file", where=path.name) from None
    if tree is None:
        return
    if not isinstance(tree, CommentedMap):
        what = f"expected sections, got {'a list' if isinstance(tree, list) else 'a single value'}"
        raise UserError(102, what, "begin the file with a section, such as `model:`", where=path.name)
    source.values = _plain(tree, "", path.name, source.where)


def _plain(tree: Any, prefix: str, file: str, where: dict[str, str]) -> Any:
    """Convert ruamel's values, which keep their spelling, to plain Python values; lists become tuples.

    Args:
        prefix: of the dotted keys in `where`, with its dot; "" at the top.
        file: name of the file.
        where: receives `file` with the line of every key, by its dotted key.
    """
    if isinstance(tree, dict):
        for key in tree if isinstance(tree, CommentedMap) else ():
            where[f"{prefix}{key}"] = f"{file}{_line(tree, key)}"
        unset = [key for key, value in tree.items() if key in _GONE and value in (None, False)]
        items = ((key, value) for key, value in tree.items() if key not in unset)
        return {str(key): _plain(value, f"{prefix}{key}.", file, where) for key, value in items}
    if isinstance(tree, list):
        return tuple(_plain(item, prefix, file, {}) for item in tree)
    return next((kind(tree) for kind in (bool, int, float, str) if isinstance(tree, kind)), tree)


def _line(tree: CommentedMap, key: Any) -> str:
    """Return the line of a key as `:7`; for a key from a merge (`<<`) its mapping's line; "" if unknown."""
    place = (tree.lc.data or {}).get(key, (tree.lc.line,))[0]
    return "" if place is None else f":{place + 1}"


def _override(text: str, source: _Source) -> None:
    key, equals, value = text.partition("=")
    if not equals or ("." not in key and key not in option_keys()) or key.count(".") > _DEEPEST:
        known = [option for option in option_keys() if equals and option.rpartition(".")[2] == key]
        hint = f"did you mean {known[0]}={value:.40}?" if known else ""
        raise UserError(108, f"'{text:.80}' is not section.key=value", hint, where=_COMMAND_LINE)
    try:
        parsed = _plain(parse_yaml(value), "", "", {})
    except Exception:  # as in _read
        raise UserError(108, f"'{value}' is not a YAML value", where=f"command line, {key}") from None
    *sections, last = key.split(".")
    target = source.values
    for section in sections:
        inner = target.get(section)
        if not isinstance(inner, dict):
            target[section] = inner = {}
        target = inner
    target[last] = parsed
    source.where[key] = _COMMAND_LINE


def _faults(error: ValidationError, source: _Source) -> dict[str, UserError]:
    """Convert pydantic's errors to UserErrors, by the place of each fault."""
    known = option_keys()
    sections, faults = sections_of(known), dict[str, UserError]()
    for item in error.errors():
        # for one branch of a union, the error's location continues after the option's name
        parts = [str(part) for part in item["loc"]]
        length = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in known), len(parts))
        key = ".".join(parts[:length])
        place = _place_inside(key, item["loc"][length:])
        where = source.locate(place if key in _MAPPINGS else key)
        if item["type"] == "extra_forbidden" and key == "stages":
            faults[place] = refusal(place, ".".join(parts[2:]), known, where)
        elif item["type"] == "extra_forbidden":
            faults |= _unknown(place, item["input"], known, source)
        elif item["type"] == "missing":
            faults[place] = UserError(105, f"{place} is missing", "add it", where=where)
        elif key in sections:
            faults[place] = UserError(105, f"{key} is a section, got {spelt(item['input'])}", where=where)
        elif not (item["type"] == "too_short" and any(given.startswith(f"{key}[") for given in faults)):
            # else the list is too short only because each of its items is wrong
            what = re.sub(r"a valid dictionary or instance of \w+", "a section", item["msg"])
            what = what.replace("Input should be", "expected").replace("a valid tuple", "a list")
            faults[place] = UserError(105, f"{place}: {what}, got {spelt(item['input'])}", where=where)
    return faults


def _unknown(place: str, value: Any, known: list[str], source: _Source) -> dict[str, UserError]:
    """Return an error for an unknown key or, for an unknown section, one for each key inside it."""
    if isinstance(value, Mapping) and value:
        inside = (_unknown(f"{place}.{key}", inner, known, source) for key, inner in value.items())
        return {key: error for errors in inside for key, error in errors.items()}
    option = next((option for option in _MAPPINGS if place.startswith(f"{option}.")), None)
    if option is not None:  # its own keys, at the depth of this one
        above = place.rpartition(".")[0]
        known = [f"{above}.{name}" for section in _MAPPINGS[option] for name in section.model_fields]
    do = "" if "[" in place else nearest(place, known)
    if place in known:
        do = "nest the key in its section: dots are for the command line"
    do = _GONE.get(place.rpartition(".")[2], do)
    return {place: UserError(104, f"unknown key {place}", do, where=source.locate(place))}


def _place_inside(key: str, inside: Sequence[int | str]) -> str:
    """Return the place of a fault inside a list of sections, `data.sources[1].weight`, or inside a mapping.

    Else, return the option's key.
    """
    if not inside or not (isinstance(inside[0], int) or key in _MAPPINGS):
        return key
    return key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside)


def _violations(config: Config, source: _Source) -> Iterator[UserError]:
    """Yield errors for the rules that the config breaks or, if there are none, that its stages break."""
    values = flatten(config)
    for rule in (broken := rules.broken_rules(values)):
        places = [source.where[key] for key in rule.options if key in source.where]
        where = _COMMAND_LINE if _COMMAND_LINE in places else next(iter(places), source.name)
        yield UserError(rule.code, rule.broken(values), rule.do, where=where)
    for number, stage in enumerate(() if broken else config.stages or ()):
        values = flatten(effective(config, stage))
        for rule in rules.broken_rules(values):
            what = f"in stages[{number}] {rule.broken(values)}"
            yield UserError(rule.code, what, rule.do, where=source.locate("stages"))
