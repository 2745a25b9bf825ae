"""Fix which shards a growing source has in each part of a run, and keep the lists: what a resume reads is what was.

When a part of a run begins, rank 0 looks into the folders of sources that grow, and takes the shards that are whole and
were not there before, by name. The list is written to RUN/shards.json before anything of it is read, and into the
manifest of every step; all ranks, and every later job, read it from there:

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

_MOST = 1 << 28  # bytes of the file: some 100 for each shard


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
    """Return the lists of a part and of those before it, once they are written to the run's file.

    Args:
        path: the file.
        manifest: of the step that the run goes on from; None: it begins.

    Raises:
        UserError: 201, 228, a folder is not there, or has no whole shard; 401, 406, the file is not to be had.
    """
    known = read_lists(path)
    if manifest is not None:
        for name, theirs in from_json(manifest.shards).items():
            later = [added for added in known.get(name, []) if added.first > theirs[-1].first]
            known[name] = [*theirs, *later]
    begins = {each.first for each in course.parts}
    lists = dict(known)  # also of sources that are not named any more: what they gave is asked for later
    for source in course.sources() or ():
        if not source.grows:
            continue
        name = str(source.name)
        done = 0 if manifest is None else manifest.step
        kept = [added for added in known.get(name, []) if added.first <= done or added.first in begins]
        if not any(added.first == part.first for added in kept) and not any(a.first > part.first for a in kept):
            kept.append(Added(part.first, _new(Path(source.path), kept)))
        lists[name] = kept
    if lists and lists != read_lists(path):
        try:
            replace_file(path, json.dumps(to_json(lists)).encode())
        except OSError as error:
            raise UserError(401, f"cannot be written: {error.strerror}", "mend that", where=path) from None
    return until(lists, part.first)


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
        warn(f"{folder}: {len(unfinished):,} shards are not whole, and left for the next stage: {unfinished[0].what}")
    if not found and not kept:
        raise unfinished[0]
    return tuple(found)


def until(lists: Lists, step: int) -> Lists:
    """Return what was added when so many steps were done, or before."""
    return {name: [added for added in each if added.first <= step] for name, each in lists.items()}


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
