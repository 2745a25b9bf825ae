"""Fix which shards a growing source has in each part of a run, and keep the lists: what a resume reads is what was.

When a part of a run begins, rank 0 looks into the folders of sources that grow, and takes the shards that are whole and
were not there before, by name. All ranks open them. Once nothing of it was refused, and before a step is trained, the
list is written to RUN/shards.json, and then into the manifest of every step; every later job reads it from there:

    {SOURCE: [{"first": steps done before, "shards": [[name, documents, tokens, digest], ...]}, ...]}

A list once written for a part holds, also where the run goes back behind its beginning. Of another run, which a run
begins from, the manifest has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.base.reading import parse_object, read_file
from megazero.config.stages import Course, Part
from megazero.data.joined import Shard, describe, shard_names
from megazero.observe.sinks import warn

if TYPE_CHECKING:
    from megazero.checkpoint.manifest import Manifest

_MOST = 1 << 22  # bytes of the lists, some 80 for each shard: they are in the manifest of every step


class Added(NamedTuple):
    """The shards that a source has got when a part began.

    Attributes:
        first: steps done before.
        shards: the new ones, in their order.
    """

    first: int
    shards: tuple[Shard, ...]


Lists = dict[str, list[Added]]  # by the name of a source


def fix_lists(course: Course, part: Part, path: Path, manifest: Manifest | None) -> Lists:
    """Return the lists of all parts, with that of a part which begins; nothing is written.

    Args:
        path: of the run's file.
        manifest: of the step that the run goes on from; None: it begins.

    Raises:
        UserError: 201, 228, a folder is not there, or has no whole shard; 228, there are too many; 401, 406, the file
            is not to be had.
    """
    known, saved = read_lists(path), {} if manifest is None else from_json(manifest.shards)
    done, begins = 0 if manifest is None else manifest.step, {each.first for each in course.parts}
    lists: Lists = {}  # also of sources that are not named any more: what they gave is asked for later
    for name in known | saved:
        theirs = saved.get(name, [])
        lists[name] = [*theirs, *(a for a in known.get(name, []) if _holds(a, theirs, done, begins))]
    for source in course.sources() or ():
        if not source.grows:
            continue
        kept = lists.get(str(source.name), [])
        if kept and kept[0].first > part.first:
            kept = []  # the run went back behind the step from which it had the source
        if not any(added.first >= part.first for added in kept):
            kept = [*kept, Added(part.first, _new(Path(source.path), kept))]
        lists[str(source.name)] = kept
    if (size := len(_text(lists))) > _MOST:
        what = f"the lists of shards have {size:,} bytes, at most {_MOST:,} go into the manifest of each step"
        raise UserError(228, what, "merge new shards into fewer (`megazero merge`)", where=path)
    return lists


def _holds(added: Added, theirs: Sequence[Added], done: int, begins: set[int]) -> bool:
    """Return whether a list of the run's file holds for a run that goes on.

    Args:
        theirs: the lists of the source that the step has which it goes on from. What is between them and that step
            belongs to a course that was left before a step of it was saved.
        begins: steps done before each part.
    """
    if theirs:
        return added.first in begins and added.first >= done and added.first > theirs[-1].first
    return added.first in begins or added.first <= done


def write_lists(path: Path, lists: Lists) -> None:
    """Write lists to the run's file, where they are not there yet. Raises UserError 401; 406."""
    if lists != read_lists(path):
        try:
            replace_file(path, _text(lists))
        except OSError as error:
            raise UserError(401, f"cannot be written: {error.strerror}", "mend that", where=path) from None


def lists_now(course: Course) -> Lists:
    """Return the lists of a course that begins now, and is written nowhere. Raises UserError as `fix_lists`."""
    growing = (source for source in course.sources() or () if source.grows)
    return {str(source.name): [Added(0, _new(Path(source.path), ()))] for source in growing}


def _new(folder: Path, kept: Sequence[Added]) -> tuple[Shard, ...]:
    """Return the whole shards of a folder that are not in any list yet; say which are not whole."""
    known, unfinished = {shard.name for added in kept for shard in added.shards}, list[UserError]()
    names = [name for name in shard_names(folder) if name not in known]
    found = describe(folder, names, unfinished.append)
    if unfinished:
        first = f"{unfinished[0].where}: {unfinished[0].what}"
        warn(f"{folder}: {len(unfinished):,} shards are not whole, and left for the next stage: {first}")
    if not found and not kept:
        raise unfinished[0]
    return tuple(found)


def until(lists: Lists, step: int) -> Lists:
    """Return what was added when so many steps were done, or before."""
    found = {name: [added for added in each if added.first <= step] for name, each in lists.items()}
    return {name: each for name, each in found.items() if each}


def read_lists(path: Path) -> Lists:
    """Return the lists of a run's file; none where there is none. Raises UserError 406: it is damaged; 401."""
    if not path.exists():
        return {}
    try:
        return from_json(parse_object(read_file(path, _MOST)))
    except OSError as error:
        raise UserError(401, f"cannot be read: {error.strerror}", "mend that", where=path) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        do = "remove it: the checkpoints have the lists too"
        raise UserError(406, f"is damaged: {error}", do, where=path) from None


def _text(lists: Lists) -> bytes:
    return json.dumps(to_json(lists)).encode()


def to_json(lists: Lists) -> dict[str, Any]:
    """Return lists in JSON's types."""
    return {
        name: [{"first": added.first, "shards": [list(shard) for shard in added.shards]} for added in each]
        for name, each in lists.items()
    }


def from_json(found: Mapping[str, Any]) -> Lists:
    """Return lists of JSON's types. Raises ValueError, TypeError, KeyError, AttributeError: they are none."""
    lists: Lists = {}
    for name, each in found.items():
        lists[name] = []
        for added in each:
            shards = tuple(Shard(str(s), int(d), int(t), str(x)) for s, d, t, x in added["shards"])
            lists[name].append(Added(int(added["first"]), shards))
    return lists
