"""Convert weights to and from transformers, both in safetensors, one part at a time: no model has to fit in memory."""

import json
import math
import re
import uuid
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import flush_file, new_folder, replace_file, writing
from megazero.base.reading import looked_up, open_regular, parse_object, read_file
from megazero.checkpoint.manifest import WEIGHT, File, Logical, Manifest, shard_name
from megazero.checkpoint.shard import FLOATS, NAMES, key_of, plan_shard, write_shard
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import read_weights
from megazero.data.tokenizers.common import GENERATION
from megazero.tools.convert.families import Family
from megazero.tools.convert.fields import ROLES
from megazero.tools.convert.tensors import Link

_Files = Mapping[str, bytes]  # name -> content
_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"
_WRITABLE = "free space there, or make it writable"
_PART = 1 << 30  # approximate bytes of a file of an imported checkpoint
_ROWS = 1 << 26  # approximate bytes of a tensor that are converted at a time
_CONFIG_BYTES, _INDEX_BYTES = 1 << 20, 4 << 20


def export(
    source: Path,
    manifest: Manifest,
    wanted: Sequence[Link],
    dtype: torch.dtype,
    target: Path,
    files: _Files,
    part: int,
    check: Callable[[Path], object],
) -> int:
    """Write a checkpoint's weights for transformers, in one or several safetensors files; return the number of files.

    Args:
        source: the folder of the step.
        dtype: the type of the tensors written.
        target: a folder that does not exist yet; it appears with everything in it.
        files: names and contents of more files: config.json, the tokenizer's.
        part: approximate bytes of a file.
        check: called with the complete folder before it appears.

    Raises:
        UserError: 410, the checkpoint is damaged; 403, it cannot be written.
    """
    sizes = {name: tensor.numel * dtype.itemsize for name, tensor in manifest.tensors.items()}
    groups = _groups(wanted, [sum(sizes[name] for name in link.ours) for link in wanted], part)
    names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    names = [_ONE] if len(groups) == 1 else names
    try:
        with new_folder(target) as staging, doing("writing weights", len(groups)) as progress:
            weight_map: dict[str, str] = {}
            for name, group in zip(names, groups, strict=True):
                theirs = {}
                for link in group:
                    ours = read_weights(source, manifest, link.ours)
                    values = link.to_theirs([ours[name].to(dtype) for name in link.ours])
                    theirs |= {name: x.contiguous() for name, x in zip(link.theirs, values, strict=True)}
                (staging / name).touch()  # with the user's default permissions; safetensors makes private files
                mode = (staging / name).stat().st_mode
                save_file(theirs, staging / name, metadata={"format": "pt"})
                (staging / name).chmod(mode)
                flush_file(staging / name)
                weight_map |= dict.fromkeys(theirs, name)
                progress.advance()
            if len(groups) > 1:
                total = sum((staging / name).stat().st_size for name in names)
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                replace_file(staging / _INDEX, json.dumps(index, indent=1).encode())
            for name, content in files.items():
                replace_file(staging / name, content)
            check(staging)
    except FileExistsError:
        raise UserError(403, "exists already", "give another --out", where=target) from None
    except (OSError, SafetensorError) as error:
        raise UserError(403, f"not exported: {error}", _WRITABLE, where=target) from None
    return len(names)


def read_config(source: Path) -> dict[str, Any]:
    """Return the config.json of a transformers folder. Raises UserError 414: it cannot be read."""
    if not source.exists() and not source.is_absolute() and len(source.parts) <= 2:  # like names on the hub
        do = f"download a model of the hub first: hf download {source} --local-dir FOLDER"
        raise UserError(414, f"no such folder{looked_up(source)}", do, where=source)
    return _json(source / "config.json", _CONFIG_BYTES)


def generation_of(folder: Path) -> dict[str, bytes]:
    """Return {file name: content} of the generation config of a transformers folder; {} if config.json is enough.

    The content is the folder's own generation config if it says more than config.json. Otherwise it is made from
    config.json if that has a list of eos ids.

    Raises:
        UserError: 414, a file cannot be read.
    """
    path, config = folder / GENERATION, folder / "config.json"
    if path.exists():
        with _refused(path):
            content = read_file(path, _CONFIG_BYTES)
            if not parse_object(content).get("_from_model_config"):  # else it repeats config.json
                return {GENERATION: content}
    told = _json(config, _CONFIG_BYTES) if config.exists() else {}
    if not isinstance(told.get("eos_token_id"), list):
        return {}
    ids = {f"{role}_token_id": told.get(f"{role}_token_id") for role in ROLES}
    return {GENERATION: json.dumps(ids, indent=1).encode()}


class Theirs:
    """The tensors of a transformers folder, which are checked before they are converted.

    Args:
        source: the folder.
        layers: the number of blocks that config.json describes.

    Attributes:
        folder: the folder.
        links, shapes: the links of the model's parameters, and the parameters' shapes, after `take`.
        slots: the places of transformers' tensors by their names, after `take`.

    Raises:
        UserError: 414, a file cannot be read, or is not safetensors.
    """

    def __init__(self, source: Path, family: Family, layers: int):
        self.folder, self._family, self._slots = source, family, _slots(source)
        if layers > len(self._slots):  # check before a loop over the layers
            what = f"config.json has {layers:,} layers, the files have {len(self._slots):,} tensors"
            raise UserError(414, what, "give the complete model of that config.json", where=source)

    def has_other_head(self) -> bool:
        """Return whether the files have a head that differs from the embedding; transformers uses it, tied or not."""
        if (head := self._family.head) not in self._slots:
            return False
        return not torch.equal(self._slots[head].values(), self._find(self._family.embedding).values())

    def take(self, found: list[Link], shapes: Mapping[str, Sequence[int]]) -> None:
        """Take the tensors of these links.

        Args:
            shapes: of our parameters.

        Raises:
            UserError: 414, a tensor is missing, has another shape, or belongs to another model; 415, it is quantised.
        """
        self.links, self.shapes = found, shapes
        self.slots = {name: self._find(name) for link in found for name in link.theirs}
        self._require_no_other()
        if lost := sorted(shapes.keys() - {name for link in found for name in link.ours}):
            raise UserError(415, f"{self._family.architecture} has no {lost[0]}", "give its model", where=self.folder)
        for link in found:
            if odd := next((name for name in link.theirs if self.slots[name].dtype not in FLOATS), None):
                what, do = f"{odd} is {self.slots[odd].dtype}: quantised weights", "give the original model"
                raise UserError(415, what, do, where=self.slots[odd].path)
            ours = [torch.empty(tuple(shapes[name]), device="meta") for name in link.ours]
            for name, expected in zip(link.theirs, link.to_theirs(ours), strict=True):
                if self.slots[name].shape != tuple(expected.shape):
                    what = f"{name}: expected shape {tuple(expected.shape)}, got {self.slots[name].shape}"
                    raise UserError(414, what, "give the weights that belong to this config.json", where=self.folder)

    def _require_no_other(self) -> None:
        """Refuse tensors that no link takes, but a tied head and values that the model computes itself."""
        for name in sorted(self._slots.keys() - {slot.key for slot in self.slots.values()}):
            if name != self._family.head and not re.fullmatch(self._family.no_parameters, name):
                what = f"{name:.80} is in the files, but not in our model, which would compute another function"
                raise UserError(414, what, "give a model with only the tensors of its config.json", where=self.folder)

    def read(self, link: Link) -> list[Tensor]:
        """Return the parameters of a link, in fp32. Raises UserError 414: one is not finite, or cannot be read."""
        theirs = [self.slots[name].values() for name in link.theirs]
        for name, values in zip(link.theirs, theirs, strict=True):
            if values.numel() and not all(math.isfinite(float(end)) for end in values.aminmax()):
                what, do = f"{name} is not finite in fp32", "give an undamaged model"
                raise UserError(414, what, do, where=self.slots[name].path)
        return [values.contiguous() for values in link.to_ours(theirs)]

    def _find(self, name: str) -> "Slot":
        """Return the place of a tensor in the files: published GPT-2 models omit the prefix."""
        for key in (name, name.removeprefix("transformer.")):
            if key in self._slots:
                return self._slots[key]
        raise UserError(414, f"{name} is missing", "give the complete model of that config.json", where=self.folder)


def import_weights(theirs: Theirs, store: Store, options: Mapping[str, Any]) -> None:
    """Write the weights of a transformers folder as a checkpoint without a run (step 0), one link at a time.

    Args:
        theirs: tensors that `take` accepted.
        store: the store of an existing folder without steps.
        options: our model section, flat.

    Raises:
        UserError: 414, weights that are not finite; 403, the checkpoint cannot be written.
    """
    tensors: dict[str, Logical] = {}
    files: list[File] = []
    with writing(store.folder, 403, _WRITABLE, "not imported"):
        staging = store.staging(0)
        staging.mkdir(parents=True)
        sizes = [sum(math.prod(theirs.slots[name].shape) for name in link.theirs) * 4 for link in theirs.links]
        groups = _groups(theirs.links, sizes, _PART)
        with doing("importing weights", len(theirs.links)) as progress:
            for index, group in enumerate(groups):
                shapes = {name: list(theirs.shapes[name]) for link in group for name in link.ours}
                numels = {name: math.prod(shape) for name, shape in shapes.items()}
                keys = [(key_of(WEIGHT, name, 0, numel), torch.float32, numel) for name, numel in numels.items()]
                beginning, places = plan_shard(keys, {"megazero": "imported"})
                values = _flat(theirs, group, progress.advance)
                files.append(write_shard(staging / shard_name(index), beginning, values))
                for (name, numel), place in zip(numels.items(), places, strict=True):
                    tensors[name] = Logical(shape=shapes[name], pieces=[[index, 0, numel, place]])
        own = {"dtype": NAMES[torch.float32], "kinds": [WEIGHT], "config": dict(options)}
        store.commit(0, Manifest.new(run=uuid.uuid4().hex[:12], tensors=tensors, files=files, **own).to_bytes())


def _flat(theirs: Theirs, links: Sequence[Link], advance: Callable[[], object]) -> Iterator[Tensor]:
    """Yield the parameters of links as flat tensors; each link is read when its turn comes."""
    for link in links:
        yield from (values.reshape(-1) for values in theirs.read(link))
        advance()


def _groups(wanted: Sequence[Link], sizes: Sequence[int], part: int) -> list[list[Link]]:
    """Return groups of links in order, each of about `part` bytes."""
    numbers = (end // part for end in accumulate(sizes))
    numbered = groupby(zip(numbers, wanted, strict=True), key=lambda pair: pair[0])
    return [[link for _, link in pairs] for _, pairs in numbered]


@dataclass(frozen=True)
class Slot:
    """The file of a transformers tensor, and its key, dtype and shape from the file's header."""

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]

    def values(self) -> Tensor:
        """Return the tensor in fp32, as it is in the file. Raises UserError 414: it cannot be read."""
        found = torch.empty(self.shape)
        step = max(1, _ROWS // max(1, 4 * math.prod(self.shape[1:])))
        for first in range(0, self.shape[0] if self.shape else 0, step):
            with _refused(self.path), safe_open(self.path, framework="pt") as file:  # else all it has read stays mapped
                found[first : first + step] = file.get_slice(self.key)[first : first + step]
        return found


def _slots(source: Path) -> dict[str, Slot]:
    """Return every tensor of a transformers folder by key, also tensors in the index's files that the index omits."""
    if (adapter := source / "adapter_config.json").exists():
        do = "merge it into the model first (merge_and_unload of peft), and remove the file"
        raise UserError(414, "belongs to an adapter, whose weights would be left out", do, where=adapter)
    if not (source / _INDEX).exists():
        return _slots_of(source / _ONE)
    names = _json(source / _INDEX, _INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(414, "has no weight_map of file names", "give another folder", where=source / _INDEX)
    if odd := [name for name in names.values() if Path(name).name != name]:
        raise UserError(414, f"names a file elsewhere: {odd[0]!r:.60}", "give another folder", where=source / _INDEX)
    held = {file: _slots_of(source / file) for file in sorted(set(names.values()))}
    if lost := next((key for key, file in names.items() if key not in held[file]), None):
        raise UserError(414, f"{lost:.80} is not in {names[lost]}", "give a complete folder", where=source / _INDEX)
    if _ONE not in names.values() and (source / _ONE).exists():
        what, do = "exists too, but the index does not name it: which is the model?", "remove one of the two"
        raise UserError(414, what, do, where=source / _ONE)
    return {**ChainMap(*held.values()), **{key: held[file][key] for key, file in names.items()}}


def _slots_of(path: Path) -> dict[str, Slot]:
    """Return the tensors of one safetensors file by key; first check that it is a regular file."""
    with _refused(path), open_regular(path), safe_open(path, framework="pt") as file:
        slices = ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118 - it is not a mapping
        return {key: Slot(path, key, part.get_dtype(), tuple(part.get_shape())) for key, part in slices}


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Convert errors of reading a file to UserError 414."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        what = f"{error.strerror or error}{looked_up(path)}" if isinstance(error, OSError) else error
        raise UserError(414, f"cannot be read: {what}", "give a folder of safetensors", where=path) from None


def _json(path: Path, limit: int) -> dict[str, Any]:
    with _refused(path):
        return parse_object(read_file(path, limit))
