"""Read and write manifests: one canonical JSON file by which everything in a checkpoint can be found and verified.

Canonical: keys sorted, no spaces, so equal content is equal bytes, and a manifest that is not byte for byte what its
content gives has been edited. `digest` is the SHA-256 of the rest; with the hashes of all blocks of all files inside,
it stands for the whole checkpoint.
"""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from megazero.base.errors import UserError
from megazero.base.reading import MIB, UnexpectedFileError, parse_object, read_file
from megazero.checkpoint.progress import Count, Part, Progress, StepCount
from megazero.checkpoint.shard import BLOCK, DTYPES, FLOATS, Shard

FILE_NAME = "manifest.json"
FORMAT = "megazero checkpoint 1"
_STATE, _MOST_STATE = re.compile("[a-z][a-z_]{0,31}"), 8  # names of an optimizer's state; their number
WEIGHT = "weight"  # the first of the kinds of values: what the optimizer updates; then the state it declares
_STEP = re.compile(r"step_([0-9]{8,10})")
_MOST_DIMS, _MOST_METRICS = 8, 100
_DO = "restore the file, or resume from another step"

ShardName = Annotated[str, StringConstraints(pattern=r"^shard_[0-9]{5}\.safetensors$")]


class File(Part):
    """One shard: name in the folder, bytes, and xxh3 (64 bits, hex) of each block of the manifest's `block` bytes."""

    name: ShardName
    size: Count
    blocks: list[str]


class Logical(Part):
    """One parameter over all ranks, without padding.

    Attributes:
        shape: of the whole parameter.
        pieces: [shard, start, stop, at ...], by start: elements [start, stop) of the flat order are in file number
            `shard`, where the bytes of each of its kinds begin at `at`.
        dtype: where it is not the manifest's. Left out of the file where it is.
        trained: it has all of the manifest's kinds; False: its weight alone, of a frozen parameter or a buffer. Left
            out of the file where it has.
    """

    shape: list[Count]
    pieces: list[list[Count]]
    dtype: str | None = None
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class PartFile(Part):
    """A rank's report to the first rank: the shard that it has written, and the pieces in it by parameter."""

    shard: File
    tensors: dict[str, list[list[Count]]]


class Manifest(Part):
    """The content of a checkpoint's manifest.

    Attributes:
        run: id of the run that wrote it; a resumed run keeps it.
        step: steps consumed.
        grid: ranks by axis, and the ZeRO stage, that wrote it; reading needs none of it.
        dtype: of the tensors that do not say another.
        kinds: the tensors that are saved of every parameter that is trained.
        tensors: by name.
        block: bytes that are hashed together.
        files: the shards.
        progress: None in weights without a run, as an import makes them.
        random: the inputs of every random number: nothing else has to be kept.
        identity: digests of the data set and the tokenizer.
        config: flat, as it was resolved.
        history: what of it was another before, oldest first: {step, key, from, to}; `to` holds behind that step. Left
            out of the file where nothing was.
        software: versions that wrote it.
        digest: SHA-256 of the rest.
    """

    format: Literal["megazero checkpoint 1"]
    run: str
    step: StepCount
    grid: dict[str, Count]
    dtype: str
    kinds: list[str]
    tensors: dict[str, Logical]
    block: Count
    files: list[File]
    progress: Progress | None
    random: dict[str, Any]
    identity: dict[str, str | None]
    config: dict[str, Any]
    software: dict[str, str]
    history: list[dict[str, Any]] = Field(default_factory=list)
    digest: str = ""

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: logical.shape for name, logical in self.tensors.items()}

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor."""
        return self.tensors[name].dtype or self.dtype

    def kinds_of(self, name: str) -> list[str]:
        """Return the kinds of values that are saved of a tensor."""
        return self.kinds if self.tensors[name].trained else self.kinds[:1]

    def other_shape(self, shapes: Mapping[str, list[int]]) -> str | None:
        """Return the first name that has another shape here, or is not in both; None: there is none."""
        own = self.shapes
        return next((name for name in sorted({*own, *shapes}) if own.get(name) != shapes.get(name)), None)

    def to_bytes(self) -> bytes:
        """Return the file's content, with its digest."""
        content = self.model_dump(exclude={"digest"})
        if self.progress is not None:
            for name, default in (("row", None), ("carried", 0)):
                if getattr(self.progress, name) == default:
                    del content["progress"][name]
        if not content["history"]:
            del content["history"]
        for logical in content["tensors"].values():
            for name, default in (("dtype", None), ("trained", True)):
                if logical[name] == default:
                    del logical[name]
        return _canonical({**content, "digest": _digest(content)}) + b"\n"

    def shard(self, index: int) -> Shard:
        file = self.files[index]
        return Shard(file.name, file.size, tuple(file.blocks))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder, whole and free of contradictions.

    Raises:
        UserError: 410, it is missing, edited or damaged; 401, the system does not let it be read; 412, it is of a run
            that this version cannot read.
    """
    path = folder / FILE_NAME
    try:
        raw = read_file(path, _most_bytes(folder), follow=False)
        content = parse_object(raw)
        if content.get("shards"):  # an earlier version had sources that grew
            what = "the run reads sources that grow, which this version does not have"
            raise UserError(412, what, "go on with the version that wrote it", where=path)
        manifest = Manifest.model_validate(content)
        expected = _digest({key: value for key, value in content.items() if key != "digest"})
    except UnexpectedFileError as error:
        raise UserError(410, f"cannot be read: {error.strerror}", _DO, where=path) from None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise UserError(410, f"cannot be read: {error.strerror}", _DO, where=path) from None
        # A fault of the machine, or of permissions, says nothing of what is on the disk.
        raise UserError(401, f"cannot be read: {error.strerror}", "mend that, and run again", where=path) from None
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        raise UserError(410, f"is no manifest: {what}", _DO, where=path) from None
    except (ValueError, RecursionError) as error:  # no JSON, or so deep that it cannot be written again
        raise UserError(410, f"is no manifest: {error}", _DO, where=path) from None
    if manifest.digest != expected:
        what = f"was edited or damaged: expected SHA-256 {manifest.digest[:16]}, got {expected[:16]}"
        raise UserError(410, what, _DO, where=path)
    if raw != manifest.to_bytes():
        raise UserError(410, "was edited or damaged: it is not in canonical form", _DO, where=path)
    if fault := _contradiction(manifest) or _wrong_progress(manifest, folder) or _wrong_history(manifest):
        raise UserError(410, f"contradicts itself: {fault}", _DO, where=path)
    return manifest


def _most_bytes(folder: Path) -> int:
    """Return how large the manifest of a folder may be.

    It has some 20 bytes for each 2^20 of a shard's, and 100 for each piece of a parameter. The shards' sizes are not
    looked up: thousands of ranks would ask at once.
    """
    return (8 + 4 * sum(name.startswith("shard_") for name in os.listdir(folder))) * MIB


def _wrong_progress(manifest: Manifest, folder: Path) -> str | None:
    """Return how the folder's name, the step and the progress disagree; None: they agree."""
    step, progress = manifest.step, manifest.progress
    if (named := step_of(folder)) is not None and named != step:
        return f"the folder is called step {named}, the manifest is of step {step}"
    if progress is None:
        return None if step == 0 else f"weights without a run are of step 0, this one is {step}"
    if progress.updates + progress.skipped != step:
        return f"{progress.updates} updates and {progress.skipped} skipped steps make no {step} steps"
    if progress.overflows > progress.skipped or progress.good_steps > progress.updates:
        return f"{progress.overflows} of {progress.skipped} skipped, {progress.good_steps} of {progress.updates} good"
    batch, varies = manifest.config.get("batch.global"), manifest.history or manifest.config.get("stages")
    if type(batch) is not int or (progress.next_sample != step * batch and not varies):
        return f"{step} steps of {batch} samples do not end at sample {progress.next_sample}"
    scale = progress.loss_scale
    if scale is not None and not (scale > 0 and math.log2(scale).is_integer()):
        return f"a loss scale is a power of two, this one is {scale}"
    row = progress.row
    if row is not None and (type(row.get("step")) is not int or row["step"] != step):
        return f"the row of metrics is of step {row.get('step')}"
    for found in () if row is None else (row, *(value for value in row.values() if isinstance(value, dict))):
        if len(found) > _MOST_METRICS or max(map(len, found), default=0) > _MOST_METRICS:
            return f"the row of metrics has {len(found)} keys, of up to {max(map(len, found))} characters"
    return None


def _wrong_history(manifest: Manifest) -> str | None:
    """Return what is wrong with the history; None: nothing."""
    before = 0
    for change in manifest.history:
        step, key = change.get("step"), change.get("key")
        if {*change} != {"step", "key", "from", "to"} or type(step) is not int or not isinstance(key, str):
            return f"a change {sorted(change)} of the history"
        if not before <= step <= manifest.step:
            return f"a change of the history behind step {step} after one behind {before}, in step {manifest.step}"
        before = step
    return None


def _contradiction(manifest: Manifest) -> str | None:
    """Return a fault that would make a reader look outside a file, or leave an element unread; None: there is none."""
    if manifest.dtype not in FLOATS or manifest.block != BLOCK or not _are_kinds(manifest):
        return f"dtype {manifest.dtype}, block {manifest.block}, kinds {manifest.kinds}"
    for index, file in enumerate(manifest.files):
        if len(file.blocks) != -(-file.size // BLOCK):
            return f"{file.name} of {file.size:,} bytes has {len(file.blocks)} hashes"
        if file.name != shard_name(index):
            return f"file {index} is called {file.name}"
    for name, logical in manifest.tensors.items():
        if len(logical.shape) > _MOST_DIMS:
            return f"{name} has {len(logical.shape)} dimensions"
        if (dtype := manifest.dtype_of(name)) not in DTYPES or (logical.trained and dtype not in FLOATS):
            return f"{name} has dtype {dtype}"
        size, end = DTYPES[dtype].itemsize, 0
        for piece in logical.pieces:
            if len(piece) != 3 + len(manifest.kinds_of(name)) or piece[0] >= len(manifest.files):
                return f"{name} has a piece {piece}"
            shard, start, stop, *places = piece
            if start != end or stop <= start:
                return f"{name} has a piece of elements {start} to {stop} after element {end}"
            if any(at + (stop - start) * size > manifest.files[shard].size for at in places):
                return f"{name} is said to lie behind the end of {manifest.files[shard].name}"
            end = stop
        if end != logical.numel:
            return f"{name} has {end} of {logical.numel} elements"
    return None


def _are_kinds(manifest: Manifest) -> bool:
    """Return whether the kinds are the weight and names of an optimizer's state, of weights alone no more than that."""
    weight, state = manifest.kinds[:1], manifest.kinds[1:]
    named = len(state) <= _MOST_STATE and all(_STATE.fullmatch(kind) for kind in state)
    distinct = len({*manifest.kinds}) == len(manifest.kinds)
    return weight == [WEIGHT] and named and distinct and (manifest.progress is not None or not state)


def step_of(path: Path) -> int | None:
    """Return the step that a folder's name says, None if it is no step's."""
    name = _STEP.fullmatch(path.name)
    step = int(name[1]) if name else None
    return step if step is not None and path.name == step_name(step) else None


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:08d}"


def shard_name(index: int) -> str:
    return f"shard_{index:05d}.safetensors"


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()
