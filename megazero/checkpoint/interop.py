"""Weights to transformers and from it: safetensors on both sides, a part at a time, so that no model has to fit."""

import json
import platform
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megazero import __version__
from megazero.checkpoint.hugging_face import Link, SpecialTokens, config_from_theirs, config_to_theirs, links
from megazero.checkpoint.manifest import FORMAT, File, Logical, Manifest, shard_name
from megazero.checkpoint.shard import BLOCK, NAMES, plan_shard, write_shard
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import read_weights
from megazero.errors import UserError
from megazero.files import flush_file, flush_folder, replace_file, temporary_name

_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"
_PART = 1 << 30  # bytes of an imported checkpoint's files, about


def export(
    source: Path,
    manifest: Manifest,
    model: Mapping[str, Any],
    target: Path,
    *,
    dtype: torch.dtype,
    part: int,
    tokens: SpecialTokens,
) -> list[Path]:
    """Writes a checkpoint's weights as transformers reads them: config.json and one or several safetensors files.

    Args:
        source: folder of the step.
        model: the config's model section, resolved.
        target: a folder that does not exist yet; it appears with everything in it.
        dtype: of the tensors written.
        part: bytes of a file, about.
        tokens: that config.json names.

    Raises:
        UserError: 410, the checkpoint is damaged; 415, transformers has no such model; 403, it cannot be written.
    """
    config = config_to_theirs(model, str(dtype).removeprefix("torch."), tokens)
    groups = list(_groups(links(model), {n: t.numel * dtype.itemsize for n, t in manifest.tensors.items()}, part))
    names = [_ONE] if len(groups) == 1 else [_name(i, len(groups)) for i in range(1, len(groups) + 1)]
    if target.exists():
        raise UserError(403, "exists already", "give another --out", where=target)
    staging = temporary_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        weight_map: dict[str, str] = {}
        for name, group in zip(names, groups, strict=True):
            theirs = dict(_theirs(source, manifest, group, dtype))
            (staging / name).touch()  # as readable as the user's other files; the library's own are private
            mode = (staging / name).stat().st_mode
            save_file(theirs, staging / name, metadata={"format": "pt"})
            (staging / name).chmod(mode)
            flush_file(staging / name)
            weight_map |= dict.fromkeys(theirs, name)
        if len(groups) > 1:
            total = sum((staging / name).stat().st_size for name in names)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            replace_file(staging / _INDEX, json.dumps(index, indent=1).encode())
        replace_file(staging / "config.json", json.dumps(config, indent=1).encode())
        staging.rename(target)
        flush_folder(target.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(403, f"not exported: {error}", "free space there", where=target) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [target / name for name in names]


def import_weights(source: Path, store: Store) -> dict[str, Any]:
    """Writes the weights of a transformers folder as a checkpoint without a run (step 0); returns the model section.

    Raises:
        UserError: 414, the folder cannot be read or lacks tensors; 415, a model that is none of ours; 403, the
            checkpoint cannot be written.
    """
    model = config_from_theirs(_json(source / "config.json"))
    files = _files(source)
    wanted = links(model)
    where = {name: _find(name, files, source) for link in wanted for name in link.theirs}
    sizes = {link.ours: sum(_numel(*where[name]) for name in link.theirs) * 4 for link in wanted}
    staging = store.staging(0)
    if store.path(0).exists():
        raise UserError(403, "holds a checkpoint of step 0 already", "give another --out", where=store.folder)
    tensors: dict[str, Logical] = {}
    shards: list[File] = []
    try:
        staging.mkdir(parents=True)
        for index, group in enumerate(_groups(wanted, sizes, _PART)):
            ours = [(link.ours, _ours(link, where)) for link in group]
            keys = [(f"weight/{name}[0:{values.numel()}]", values.dtype, values.numel()) for name, values in ours]
            beginning, places = plan_shard(keys, {"megazero": "imported"})
            flat = [values.reshape(-1) for _, values in ours]
            shard = write_shard(staging / shard_name(index), beginning, flat)
            shards.append(File(name=shard.name, size=shard.size, blocks=list(shard.blocks)))
            for (name, values), place in zip(ours, places, strict=True):
                tensors[name] = Logical(shape=list(values.shape), pieces=[[index, 0, values.numel(), place]])
        store.commit(0, _manifest(model, tensors, shards).to_bytes())
    except OSError as error:
        raise UserError(403, f"not imported: {error.strerror}", "free space there", where=store.folder) from None
    finally:
        store.abandon(0)
    return model


def _manifest(model: Mapping[str, Any], tensors: dict[str, Logical], files: list[File]) -> Manifest:
    return Manifest(
        format=FORMAT,
        run=uuid.uuid4().hex[:12],
        step=0,
        grid={},
        dtype=NAMES[torch.float32],
        kinds=["weight"],
        tensors=tensors,
        block=BLOCK,
        files=files,
        progress=None,
        random={},
        identity={},
        config={f"model.{key}": value for key, value in model.items()},
        software={"megazero": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def _groups(wanted: Sequence[Link], sizes: Mapping[str, int], part: int) -> Iterator[list[Link]]:
    """In order, each of about `part` bytes."""
    group: list[Link] = []
    size = 0
    for link in wanted:
        if group and size + sizes[link.ours] > part:
            yield group
            group, size = [], 0
        group.append(link)
        size += sizes[link.ours]
    yield group


def _theirs(
    source: Path, manifest: Manifest, group: Sequence[Link], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    weights = read_weights(source, manifest, [link.ours for link in group])
    for link in group:
        values = link.to_theirs(weights.pop(link.ours))
        for name, value in zip(link.theirs, values, strict=True):
            yield name, value.to(dtype).contiguous()


def _ours(link: Link, where: Mapping[str, tuple[Path, str]]) -> Tensor:
    theirs = []
    for name in link.theirs:
        path, key = where[name]
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(key)
        if tensor.dtype not in NAMES:
            raise UserError(
                415, f"{key} is {tensor.dtype}: quantised weights", "give the model before that", where=path
            )
        theirs.append(tensor.to(torch.float32))
    return link.to_ours(theirs).contiguous()


def _files(source: Path) -> dict[str, Path]:
    """The file of each tensor of a transformers folder."""
    if (source / _INDEX).exists():
        names = _json(source / _INDEX).get("weight_map", {})
        if odd := [name for name in names.values() if Path(name).name != name]:
            raise UserError(414, f"names a file elsewhere: {odd[0]}", "give another folder", where=source / _INDEX)
        return {key: source / name for key, name in names.items()}
    path = source / _ONE
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except (OSError, SafetensorError) as error:
        raise UserError(414, f"cannot be read: {error}", "a folder of safetensors is needed", where=path) from None


def _find(name: str, files: Mapping[str, Path], source: Path) -> tuple[Path, str]:
    """Where a tensor is, and under which name: published GPT-2 models leave the prefix out."""
    for key in (name, name.removeprefix("transformer.")):
        if key in files:
            return files[key], key
    raise UserError(414, f"{name} is not there", "is it a whole model of that config.json?", where=source)


def _numel(path: Path, key: str) -> int:
    try:
        with safe_open(path, framework="pt") as file:
            return torch.Size(file.get_slice(key).get_shape()).numel()
    except (OSError, SafetensorError) as error:
        raise UserError(414, f"cannot be read: {error}", "give another folder", where=path) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError) as error:
        raise UserError(414, f"cannot be read: {error}", "give a folder of transformers", where=path) from None


def _name(number: int, of: int) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"
