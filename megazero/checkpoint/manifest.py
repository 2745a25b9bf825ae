"""Read and write manifests: one canonical JSON file by which everything in a checkpoint can be found and verified.

Canonical: keys sorted, no spaces, so equal content is equal bytes, and a manifest that is not byte for byte what its
content gives has been edited. `digest` is the SHA-256 of the rest; with the hashes of all blocks of all files inside,
it stands for the whole checkpoint.
"""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, StringConstraints, ValidationError

from megazero.base.errors import UserError
from megazero.base.reading import MIB, UnexpectedFileError, parse_object, read_file
from megazero.base.version import __version__
from megazero.checkpoint.progress import Count, Progress, StepCount, StrictModel
from megazero.checkpoint.shard import BLOCK, DTYPES, FLOATS, File, damaged, reading

FILE_NAME = "manifest.json"
FORMAT = "megazero checkpoint 1"
_STEP = re.compile(r"step_([0-9]{8,10})")
WEIGHT = "weight"  # the first of the kinds of values: what the optimizer updates; then the state it declares
SOFTWARE = {"megazero": __version__, "torch": torch.__version__, "python": platform.python_version()}  # that runs here
_MOST_KINDS = 9
_PART_BYTES = 256 << 20

Kind = Annotated[str, StringConstraints(pattern="^[a-z][a-z_]{0,31}$")]
Float = Annotated[str, StringConstraints(pattern="^(F32|F64|BF16|F16)$")]
Dtype = Annotated[str, StringConstraints(pattern=f"^({'|'.join(DTYPES)})$")]


class Logical(StrictModel):
    """One parameter over all ranks, without padding.

    Attributes:
        shape: of the whole parameter.
        pieces: [shard, start, stop, at ...], by start: elements [start, stop) of the flat order are in file number
            `shard`, where the bytes of each of its kinds begin at `at`.
        dtype: where it is not the manifest's. Left out of the file where it is.
        trained: it has all of the manifest's kinds; False: its weight alone, of a frozen parameter or a buffer. Left
            out of the file where it has.
    """

    shape: Annotated[list[Count], Field(max_length=8)]
    pieces: list[list[Count]]
    dtype: Dtype | None = None
    trained: bool = True

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


class WrittenShard(StrictModel):
    """A rank's report to the first rank: the shard that it has written, and the pieces in it by parameter."""

    shard: File
    tensors: dict[str, list[list[Count]]]


class Manifest(StrictModel):
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
        history: what of it was another before, oldest first: {step, key, from, to}; `to` holds after that step. Left
            out of the file where nothing was.
        software: versions that wrote it.
        digest: SHA-256 of the rest.
    """

    format: Literal["megazero checkpoint 1"]
    run: str
    step: StepCount
    grid: dict[str, Count]
    dtype: Float
    kinds: Annotated[list[Kind], Field(max_length=_MOST_KINDS)]
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
        """Return the shape of each tensor by its name."""
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
        content = self.model_dump(exclude={"digest"}, exclude_defaults=True)
        return _canonical({**content, "digest": _digest(content)}) + b"\n"


def with_pieces(tensors: Mapping[str, Logical], parts: Sequence[WrittenShard]) -> dict[str, Logical]:
    """Return tensors with the pieces of them that all ranks have written."""
    pieces = {name: [piece for part in parts for piece in part.tensors.get(name, [])] for name in tensors}
    return {n: t.model_copy(update={"pieces": sorted(pieces[n], key=itemgetter(1))}) for n, t in tensors.items()}


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder, whole and free of contradictions.

    Raises:
        UserError: 410, it is missing, edited or damaged; 401, the system does not let it be read; 412, it is of a run
            that this version cannot read.
    """
    path = folder / FILE_NAME
    with reading(path):
        # Some 20 bytes for each 2^20 of a shard's, and 100 for each piece of a parameter. The shards' sizes are not
        # looked up: thousands of ranks would ask at once.
        most = (8 + 4 * sum(name.startswith("shard_") for name in os.listdir(folder))) * MIB
        raw = read_file(path, most, follow=False)
    try:
        content = parse_object(raw)
        if content.get("shards"):  # an earlier version had sources that grew
            what = "the run reads sources that grow, which this version does not have"
            raise UserError(412, what, "go on with the version that wrote it", where=path)
        manifest = Manifest.model_validate(content)
        expected = _digest({key: value for key, value in content.items() if key != "digest"})
    except UserError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        raise damaged(path, f"is no manifest: {what}") from None
    except (ValueError, RecursionError) as error:  # no JSON, or so deep that it cannot be written again
        raise damaged(path, f"is no manifest: {error}") from None
    if manifest.digest != expected:
        what = f"was edited or damaged: expected SHA-256 {manifest.digest[:16]}, got {expected[:16]}"
        raise damaged(path, what)
    if fault := next(_contradictions(manifest, folder), None):
        raise damaged(path, f"contradicts itself: {fault}")
    return manifest


def read_part(path: Path) -> WrittenShard:
    """Return the content of a rank's part file. Raises OSError: it cannot be read, or another program wrote it."""
    try:
        return WrittenShard.model_validate(parse_object(read_file(path, _PART_BYTES, follow=False)))
    except ValueError as error:
        raise UnexpectedFileError(f"{path.name} is damaged: {error}", path) from None


def _contradictions(manifest: Manifest, folder: Path) -> Iterator[str]:
    """Yield what would make a reader look outside a file, leave an element unread, or take one step for another."""
    kinds, progress = manifest.kinds, manifest.progress
    if manifest.block != BLOCK:
        yield f"block {manifest.block}"
    if kinds[:1] != [WEIGHT] or len({*kinds}) < len(kinds) or (len(kinds) > 1 and progress is None):
        yield f"kinds {kinds}"
    for index, file in enumerate(manifest.files):
        if (file.name, len(file.blocks)) != (shard_name(index), -(-file.size // BLOCK)):
            yield f"file {index} is {file.name} of {file.size:,} bytes with {len(file.blocks)} hashes"
    if manifest.step != (0 if progress is None else progress.updates + progress.skipped):
        yield f"its updates and skipped steps make no {manifest.step} steps"
    for name in manifest.tensors:
        yield from _wrong_pieces(manifest, name)
    if (named := step_of(folder)) is not None and named != manifest.step:
        yield f"the folder is called step {named}, the manifest is of step {manifest.step}"


def _wrong_pieces(manifest: Manifest, name: str) -> Iterator[str]:
    logical, dtype, end = manifest.tensors[name], manifest.dtype_of(name), 0
    if logical.trained and dtype not in FLOATS:
        yield f"{name} has dtype {dtype}"
    for piece in logical.pieces:
        if len(piece) != 3 + len(manifest.kinds_of(name)) or piece[0] >= len(manifest.files):
            yield f"{name} has a piece {piece}"
            return
        shard, start, stop, *places = piece
        if start != end or stop <= start:
            yield f"{name} has a piece of elements {start} to {stop} after element {end}"
        if any(at + (stop - start) * DTYPES[dtype].itemsize > manifest.files[shard].size for at in places):
            yield f"{name} is said to be after the end of {manifest.files[shard].name}"
        end = stop
    if end != logical.numel:
        yield f"{name} has {end} of {logical.numel} elements"


def step_of(path: Path) -> int | None:
    """Return the step that a folder's name says, None if it is no step's."""
    name = _STEP.fullmatch(path.name)
    step = int(name[1]) if name else None
    return step if step is not None and path.name == step_name(step) else None


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:08d}"


def shard_name(index: int) -> str:
    """Return the name of a rank's file."""
    return f"shard_{index:05d}.safetensors"


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()
