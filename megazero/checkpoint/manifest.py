"""Read and write manifests: one canonical JSON file that locates and verifies everything in a checkpoint.

Canonical: keys are sorted and there are no spaces, so equal content gives equal bytes. `digest` is the SHA-256 of the
rest, which contains the hashes of all blocks of all files; so it identifies the whole checkpoint.
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
WEIGHT = "weight"  # the first kind: the values that the optimizer updates; the kinds of optimizer state follow
SOFTWARE = {"megazero": __version__, "torch": torch.__version__, "python": platform.python_version()}  # of this process
_MOST_KINDS = 9
_PART_BYTES = 256 << 20

Kind = Annotated[str, StringConstraints(pattern="^[a-z][a-z_]{0,31}$")]
Float = Annotated[str, StringConstraints(pattern="^(F32|F64|BF16|F16)$")]
Dtype = Annotated[str, StringConstraints(pattern=f"^({'|'.join(DTYPES)})$")]


class Logical(StrictModel):
    """One parameter over all ranks, without padding.

    Attributes:
        shape: of the whole parameter.
        pieces: [shard, start, stop, at ...], sorted by start: elements [start, stop) of the flat order are in file
            number `shard`; there is one `at` for each kind, the byte where its values begin.
        dtype: if it differs from the manifest's; else it is left out of the file.
        trained: False: only the weight is saved, of a frozen parameter or a buffer; True is left out of the file.
        kinds: the kinds of values that are saved, if they are not all of the manifest's; else left out of the file.
    """

    shape: Annotated[list[Count], Field(max_length=8)]
    pieces: list[list[Count]]
    dtype: Dtype | None = None
    trained: bool = True
    kinds: Annotated[list[Kind], Field(max_length=_MOST_KINDS)] | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


class WrittenShard(StrictModel):
    """A rank's report to the first rank: the shard it has written, and the shard's pieces by parameter."""

    shard: File
    tensors: dict[str, list[list[Count]]]


class Manifest(StrictModel):
    """The content of a checkpoint's manifest.

    Attributes:
        run: id of the run that wrote it; a resumed run keeps the id.
        step: number of steps done, skipped ones included.
        grid: the writer's ranks by axis and its ZeRO stage; for information, not needed to read.
        dtype: of all tensors without a dtype of their own.
        kinds: the kinds of values saved for trained parameters: the weight, then the optimizers' states.
        dtypes: of kinds that have another dtype than the weight; left out of the file if empty.
        tensors: the parameters and buffers by name.
        block: bytes that are hashed together.
        files: the shards.
        progress: None for weights without a run, as an import writes them.
        random: the inputs of all random numbers; there is no other generator state.
        identity: digests of the data set and the tokenizer.
        config: the resolved config, as {"section.key": value}.
        history: changes of config options, oldest first: {step, key, from, to}; `to` is valid after that step. Left
            out of the file if empty.
        software: the writer's versions.
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
    dtypes: dict[Kind, Float] = Field(default_factory=dict)
    digest: str = ""

    @classmethod
    def new(cls, **given: Any) -> "Manifest":
        """Return a manifest that this process writes, of step 0; everything that is not given is empty."""
        empty = {"step": 0, "grid": {}, "files": [], "progress": None, "random": {}, "identity": {}}
        return cls(**{"format": FORMAT, "block": BLOCK, "software": SOFTWARE, **empty, **given})

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor by its name."""
        return {name: logical.shape for name, logical in self.tensors.items()}

    def dtype_of(self, name: str, kind: str = WEIGHT) -> str:
        """Return the dtype of a kind of values of a tensor."""
        return self.dtypes.get(kind) or self.tensors[name].dtype or self.dtype

    def kinds_of(self, name: str) -> list[str]:
        """Return the kinds of values that are saved for a tensor."""
        logical = self.tensors[name]
        return logical.kinds or (self.kinds if logical.trained else self.kinds[:1])

    def other_shape(self, shapes: Mapping[str, list[int]]) -> str | None:
        """Return the first name whose shape differs or that only one side has; None if all shapes match."""
        own = self.shapes
        return next((name for name in sorted({*own, *shapes}) if own.get(name) != shapes.get(name)), None)

    def to_bytes(self) -> bytes:
        """Return the file's content, with its digest."""
        content = self.model_dump(exclude={"digest"}, exclude_defaults=True)
        return _canonical({**content, "digest": _digest(content)}) + b"\n"


def with_pieces(tensors: Mapping[str, Logical], parts: Sequence[WrittenShard]) -> dict[str, Logical]:
    """Return a copy of `tensors` with the pieces that all ranks have written."""
    pieces = {name: [piece for part in parts for piece in part.tensors.get(name, [])] for name in tensors}
    return {n: t.model_copy(update={"pieces": sorted(pieces[n], key=itemgetter(1))}) for n, t in tensors.items()}


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder, verified and checked for contradictions.

    Raises:
        UserError: 410, it is missing, edited or damaged; 401, the system cannot read it; 412, it is of a run that this
            version cannot continue.
    """
    path = folder / FILE_NAME
    with reading(path):
        # A manifest has some 20 bytes per MiB of a shard, and 100 per piece. The limit does not use the shards' sizes:
        # thousands of ranks would query them from the file system at once.
        most = (8 + 4 * sum(name.startswith("shard_") for name in os.listdir(folder))) * MIB
        raw = read_file(path, most, follow=False)
    try:
        content = parse_object(raw)
        if content.get("shards"):  # an earlier version had sources that grew
            what = "the run reads growing sources, which this version does not support"
            raise UserError(412, what, "resume with the version that wrote it", where=path)
        manifest = Manifest.model_validate(content)
        expected = _digest({key: value for key, value in content.items() if key != "digest"})
    except UserError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        raise damaged(path, f"is not a manifest: {what}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply to be written
        raise damaged(path, f"is not a manifest: {error}") from None
    if manifest.digest != expected:
        what = f"was edited or damaged: expected SHA-256 {manifest.digest[:16]}, got {expected[:16]}"
        raise damaged(path, what)
    if fault := next(_contradictions(manifest, folder), None):
        raise damaged(path, f"is inconsistent: {fault}")
    return manifest


def read_part(path: Path) -> WrittenShard:
    """Return what a rank has reported about its shard. Raises OSError if the file cannot be read or has no report."""
    try:
        return WrittenShard.model_validate(parse_object(read_file(path, _PART_BYTES, follow=False)))
    except ValueError as error:
        raise UnexpectedFileError(f"{path.name} is damaged: {error}", path) from None


def _contradictions(manifest: Manifest, folder: Path) -> Iterator[str]:
    """Yield faults that would make a reader read outside a file, miss an element, or confuse two steps."""
    kinds, progress = manifest.kinds, manifest.progress
    if manifest.block != BLOCK:
        yield f"block {manifest.block}"
    if kinds[:1] != [WEIGHT] or len({*kinds}) < len(kinds) or (len(kinds) > 1 and progress is None):
        yield f"kinds {kinds}"
    for index, file in enumerate(manifest.files):
        if (file.name, len(file.blocks)) != (shard_name(index), -(-file.size // BLOCK)):
            yield f"file {index} is {file.name} of {file.size:,} bytes with {len(file.blocks)} hashes"
    if manifest.step != (0 if progress is None else progress.updates + progress.skipped):
        yield f"its updates and skipped steps do not add up to step {manifest.step}"
    for name in manifest.tensors:
        own = manifest.kinds_of(name)
        if own[:1] != [WEIGHT] or not {*own} <= {*kinds} or len({*own}) < len(own):
            yield f"{name} has kinds {own}"
        yield from _wrong_pieces(manifest, name)
    if (named := step_of(folder)) is not None and named != manifest.step:
        yield f"the folder is named step {named}, the manifest says step {manifest.step}"


def _wrong_pieces(manifest: Manifest, name: str) -> Iterator[str]:
    logical, dtype, end = manifest.tensors[name], manifest.dtype_of(name), 0
    sizes = [DTYPES[manifest.dtype_of(name, kind)].itemsize for kind in manifest.kinds_of(name)]
    if logical.trained and dtype not in FLOATS:
        yield f"{name} has dtype {dtype}"
    for piece in logical.pieces:
        if len(piece) != 3 + len(manifest.kinds_of(name)) or piece[0] >= len(manifest.files):
            yield f"{name} has a piece {piece}"
            return
        shard, start, stop, *places = piece
        if start != end or stop <= start:
            yield f"{name} has a piece of elements {start} to {stop} after element {end}"
        ends = [at + (stop - start) * size for at, size in zip(places, sizes, strict=True)]
        if any(each > manifest.files[shard].size for each in ends):
            yield f"{name} ends after the end of {manifest.files[shard].name}"
        end = stop
    if end != logical.numel:
        yield f"{name} has {end} of {logical.numel} elements"


def step_of(path: Path) -> int | None:
    """Return the step in a folder's name; None if the folder is not a step's."""
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
