"""Convert weights to and from transformers, both in safetensors, one part at a time: no model has to fit in memory."""

import json
import math
import uuid
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
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
from megazero.base.files import flush_file, new_folder, replace_file
from megazero.base.reading import looked_up, open_regular, parse_object, read_file
from megazero.checkpoint.manifest import FORMAT, SOFTWARE, WEIGHT, File, Logical, Manifest, shard_name
from megazero.checkpoint.shard import BLOCK, FLOATS, NAMES, key_of, plan_shard, write_shard
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import read_weights
from megazero.config.schema import Model
from megazero.tools.convert.hugging_face import HEAD, ROLES, Link, config_from_theirs, family_of, is_no_parameter, links

_Files = Mapping[str, bytes]  # name -> content
_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"
GENERATION = "generation_config.json"
_WRITABLE = "free space there, or make it writable"
_PART = 1 << 30  # approximate bytes of a file of an imported checkpoint
_CONFIG_BYTES, _INDEX_BYTES = 1 << 20, 4 << 20


def export(
    source: Path, manifest: Manifest, wanted: Sequence[Link], dtype: torch.dtype, target: Path, files: _Files, part: int
) -> int:
    """Write a checkpoint's weights for transformers, in one or several safetensors files; return the number of files.

    Args:
        source: the folder of the step.
        dtype: the type of the tensors written.
        target: a folder that does not exist yet; it appears with everything in it.
        files: names and contents of more files: config.json, the tokenizer's.
        part: approximate bytes of a file.

    Raises:
        UserError: 410, the checkpoint is damaged; 403, it cannot be written.
    """
    groups = _groups(wanted, {n: t.numel * dtype.itemsize for n, t in manifest.tensors.items()}, part)
    names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    names = [_ONE] if len(groups) == 1 else names
    try:
        with new_folder(target) as staging, doing("writing weights", len(groups)) as progress:
            weight_map: dict[str, str] = {}
            for name, group in zip(names, groups, strict=True):
                weights = read_weights(source, manifest, [link.ours for link in group])
                theirs = {
                    their: value.to(dtype).contiguous()
                    for link in group
                    for their, value in zip(link.theirs, link.to_theirs(weights.pop(link.ours)), strict=True)
                }
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
    except FileExistsError:
        raise UserError(403, "exists already", "give another --out", where=target) from None
    except (OSError, SafetensorError) as error:
        raise UserError(403, f"not exported: {error}", _WRITABLE, where=target) from None
    return len(names)


def read_config(source: Path) -> Model:
    """Return our model section for a transformers folder.

    Raises:
        UserError: 414, its config.json cannot be read; 415, our models do not support it.
    """
    if not source.exists() and not source.is_absolute() and len(source.parts) <= 2:  # like names on the hub
        do = f"download a model of the hub first: hf download {source} --local-dir FOLDER"
        raise UserError(414, f"no such folder{looked_up(source)}", do, where=source)
    path = source / "config.json"
    return config_from_theirs(_json(path, _CONFIG_BYTES), path)


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
        model: our model section, which obeys the config's rules.

    Attributes:
        model: this section, but untied if the files have a head that differs from the embedding.
        numel: elements of all tensors that make the model's parameters.

    Raises:
        UserError: 414, a file cannot be read, or is not safetensors; a tensor is missing, or belongs to another model.
    """

    def __init__(self, source: Path, model: Mapping[str, Any]):
        self._source = source
        self._slots = _slots(source)
        if model["layers"] > len(self._slots):  # check before a loop over the layers
            what = f"config.json has {model['layers']:,} layers, the files have {len(self._slots):,} tensors"
            raise UserError(414, what, "give the complete model of that config.json", where=source)
        self.model = {**model, "tie_embeddings": model["tie_embeddings"] and not self._has_other_head(model)}
        self.links = links(self.model)
        self._keys = {name: self._find(name) for link in self.links for name in link.theirs}
        unused = sorted(self._slots.keys() - set(self._keys.values()))
        if odd := next((name for name in unused if not is_no_parameter(name, self.model)), None):
            what = f"{odd:.80} is in the files, but not in our model, which would compute another function"
            raise UserError(414, what, "give a model with only the tensors of its config.json", where=source)
        self.numel = sum(math.prod(self.slot(name).shape) for name in self._keys)

    def _has_other_head(self, model: Mapping[str, Any]) -> bool:
        """Return whether the files have a head that differs from the embedding; transformers uses it, tied or not."""
        if HEAD not in self._slots:
            return False
        head, embedding = HEAD, self._find(family_of(model).embedding)
        return not torch.equal(self._values(head), self._values(embedding))  # another shape differs too

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Refuse tensors that do not make parameters of these shapes, or are quantised.

        Raises:
            UserError: 414, another shape; 415, quantised.
        """
        for link in self.links:
            for name in link.theirs:
                slot = self.slot(name)
                if slot.dtype not in FLOATS:
                    what, do = f"{name} is {slot.dtype}: quantised weights", "give the original model"
                    raise UserError(415, what, do, where=slot.path)
            ours = torch.empty(tuple(shapes[link.ours]), device="meta")
            for name, expected in zip(link.theirs, link.to_theirs(ours), strict=True):
                if self.slot(name).shape != tuple(expected.shape):
                    what = f"{name}: expected shape {tuple(expected.shape)}, got {self.slot(name).shape}"
                    raise UserError(414, what, "give the weights that belong to this config.json", where=self._source)

    def read(self, link: Link) -> Tensor:
        """Return one of our parameters, in fp32. Raises UserError 414: it is not finite, or cannot be read."""
        theirs = [self._values(self._keys[name]) for name in link.theirs]
        if odd := [name for name, x in zip(link.theirs, theirs, strict=True) if not torch.isfinite(x).all()]:
            what, do = f"{odd[0]} is not finite in fp32", "give an undamaged model"
            raise UserError(414, what, do, where=self.slot(odd[0]).path)
        return link.to_ours(theirs).contiguous()

    def _values(self, key: str) -> Tensor:
        path = self._slots[key].path
        with _refused(path), safe_open(path, framework="pt") as file:
            return file.get_tensor(key).to(torch.float32)

    def slot(self, name: str) -> "Slot":
        """Return the file, dtype and shape of a transformers tensor."""
        return self._slots[self._keys[name]]

    def _find(self, name: str) -> str:
        """Return the key of a tensor in the files: published GPT-2 models omit the prefix."""
        for key in (name, name.removeprefix("transformer.")):
            if key in self._slots:
                return key
        raise UserError(414, f"{name} is missing", "give the complete model of that config.json", where=self._source)


def import_weights(theirs: Theirs, store: Store) -> None:
    """Write the weights of a transformers folder as a checkpoint without a run (step 0).

    Args:
        theirs: tensors that `check` accepted.
        store: the store of an existing folder without steps.

    Raises:
        UserError: 414, weights that are not finite; 403, the checkpoint cannot be written.
    """
    sizes = {link.ours: sum(math.prod(theirs.slot(name).shape) for name in link.theirs) * 4 for link in theirs.links}
    tensors: dict[str, Logical] = {}
    files: list[File] = []
    try:
        staging = store.staging(0)
        staging.mkdir(parents=True)
        groups = _groups(theirs.links, sizes, _PART)
        with doing("importing weights", len(groups)) as progress:
            for index, group in enumerate(groups):
                ours = [(link.ours, theirs.read(link)) for link in group]
                keys = [(key_of(WEIGHT, name, 0, x.numel()), x.dtype, x.numel()) for name, x in ours]
                beginning, places = plan_shard(keys, {"megazero": "imported"})
                flat = [values.reshape(-1) for _, values in ours]
                files.append(write_shard(staging / shard_name(index), beginning, flat))
                for (name, values), place in zip(ours, places, strict=True):
                    tensors[name] = Logical(shape=list(values.shape), pieces=[[index, 0, values.numel(), place]])
                progress.advance()
        store.commit(0, _manifest(theirs.model, tensors, files).to_bytes())
    except OSError as error:
        raise UserError(403, f"not imported: {error.strerror}", _WRITABLE, where=store.folder) from None


def _manifest(model: Mapping[str, Any], tensors: dict[str, Logical], files: list[File]) -> Manifest:
    return Manifest(
        format=FORMAT,
        run=uuid.uuid4().hex[:12],
        step=0,
        grid={},
        dtype=NAMES[torch.float32],
        kinds=[WEIGHT],
        tensors=tensors,
        block=BLOCK,
        files=files,
        progress=None,
        random={},
        identity={},
        config={f"model.{key}": value for key, value in model.items()},
        software=SOFTWARE,
    )


def _groups(wanted: Sequence[Link], sizes: Mapping[str, int], part: int) -> list[list[Link]]:
    """Return groups of links in order, each of about `part` bytes."""
    numbers = (end // part for end in accumulate(sizes[link.ours] for link in wanted))
    numbered = groupby(zip(numbers, wanted, strict=True), key=lambda pair: pair[0])
    return [[link for _, link in pairs] for _, pairs in numbered]


@dataclass(frozen=True)
class Slot:
    """The file of a transformers tensor, and its dtype and shape from the file's header."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


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
        return {key: Slot(path, part.get_dtype(), tuple(part.get_shape())) for key, part in slices}


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
