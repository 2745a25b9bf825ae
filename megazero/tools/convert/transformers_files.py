"""The verbs export and import: convert a run to files of transformers, and such files to a folder for training."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.base.files import new_folder, replace_file
from megazero.base.reading import parse_object, read_file
from megazero.builders.assemble import DTYPES, build_model
from megazero.builders.job import changed
from megazero.checkpoint.manifest import Manifest, read_manifest
from megazero.checkpoint.retention import verify
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_whole, read_weights, require_shapes, with_averages
from megazero.config.file import load
from megazero.config.flat import dump, flatten, plain
from megazero.config.rules import broken_rules
from megazero.config.schema import Config, Data, Model, resolved
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.data.tokenizers.common import CONFIG, config_beside, read_tokenizer
from megazero.data.tokenizers.plain_bytes import NAME
from megazero.model.parameter import whole_shapes
from megazero.run.folder import RunFolder
from megazero.tools.convert.families import families
from megazero.tools.convert.fields import ROLES, fitting, model_from_theirs, shape_of, to_theirs
from megazero.tools.convert.interop import Theirs, export, generation_of, import_weights, read_config
from megazero.tools.convert.proof import Proof, Sides, prove
from megazero.tools.convert.tensors import Link, heads_of, links
from megazero.tools.convert.tokenizer_files import for_transformers, own_file

PROOF = "proof.json"
_TEXT = "The quick brown fox jumps over the lazy dog; 1,234 times. It was not amused, and said so.\n"


def export_run(
    folder: RunFolder,
    target: Path,
    part_mb: int,
    asked: str | None,
    warn: Callable[[str], object],
    *,
    proven: bool,
    average: bool = False,
) -> str:
    """Export the newest whole checkpoint of a run; return a line about the written files.

    Args:
        asked: the family to export as; None: that of the import, or the first that fits.
        warn: called for each newer step that is damaged, and for a tokenizer that cannot be read.
        proven: compare the written model with ours, by transformers.
        average: export the averages of the weights (`optimizer.average`).

    Raises:
        UserError: 113, the folder is not a run; 402, it has no checkpoint, or no averages; 404, its checkpoint has
            another model; 410, the last one tried is damaged; 162 and 415, its tokenizer or its model cannot be
            described; 416, the written model computes another function; and those of `export`.
    """
    folder.require_run()
    config = load(str(folder.config))
    store = Store(folder.checkpoints)
    manifest = newest_whole(store, verify, warn)
    source, shapes = store.path(manifest.step), whole_shapes(build_model(config))
    tokenizer = _tokenizer(config, warn)
    # Files that belong to an imported model are next to its tokenizer, or in the folder of the import.
    near = tokenizer.path.parent if tokenizer is not None and tokenizer.files else folder.path
    name = fitting(config.model, asked, _imported_as(folder.path) or _imported_as(near))
    require_shapes(manifest, shapes, source)
    manifest = with_averages(manifest, source) if average else manifest
    files: dict[str, bytes] = {}
    tokens: dict[str, int] = {}
    if tokenizer is not None:
        files = for_transformers(tokenizer)
        pad = tokenizer.specials.get(json.loads(files[CONFIG]).get("pad_token"))
        tokens = {"bos": tokenizer.bos, "eos": tokenizer.eod} | ({} if pad is None else {"pad": pad})
    dtype = DTYPES[config.precision.dtype]
    # Ids that are missing are written as null: the defaults of transformers mean something else in another vocabulary.
    theirs = to_theirs(name, config.model) | {f"{role}_token_id": tokens.get(role) for role in ROLES}
    theirs["torch_dtype"] = str(dtype).removeprefix("torch.")
    files |= generation_of(near) | {"config.json": json.dumps(theirs, indent=1).encode()}
    found = _links(name, config.model, shapes)
    proof = Proof(reason="not asked for")

    def check(folder: Path) -> None:
        nonlocal proof
        if proven:
            written = Theirs(folder, families()[name], config.model.layers)
            written.take(found(config.model.layers), shapes)
            proof = prove(_sides(written, found, config.model, source, manifest, tokenizer, dtype))

    count = export(source, manifest, found(config.model.layers), dtype, target, files, part_mb << 20, check)
    carried = f", and its tokenizer {tokenizer.path}" if tokenizer is not None else ""
    return f"{target}: the weights of {source} as {name}, {count} file{'s' * (count > 1)}{carried}; {proof}"


def _imported_as(folder: Path) -> str | None:
    """Return the family that an import has noted in a folder."""
    path = folder / PROOF
    try:
        family = parse_object(read_file(path, 1 << 20)).get("family") if path.exists() else None
    except ValueError:
        return None
    return family if isinstance(family, str) and family in families() else None


def _links(name: str, model: Model, shapes: Mapping[str, object]) -> Callable[[int], list[Link]]:
    """Return a function that gives the links of a family for a number of a model's blocks."""
    family = families()[name]
    heads = heads_of(shape_of(model), interleaved=family.interleaved)
    return lambda layers: links(family.rows, heads, layers, shapes.keys())


def _sides(
    theirs: Theirs,
    found: Callable[[int], list[Link]],
    model: Model,
    step: Path,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype = torch.float32,
) -> Sides:
    """Return the two models to compare: a folder of transformers, and a step of ours, rounded as the folder is."""

    def ours(name: str) -> Tensor:
        return read_weights(step, manifest, [name])[name].to(dtype)

    text = [] if tokenizer is None else tokenizer.encode(_TEXT)
    return Sides(theirs.folder, shape_of(model), found, lambda name: theirs.slots[name].values(), ours, text)


def _tokenizer(config: Config, warn: Callable[[str], object]) -> Tokenizer | None:
    """Return the run's tokenizer, or None with a warning: weights can be exported without it."""
    if config.data.tokenizer is None:
        return None
    try:
        return open_tokenizer(config.data.tokenizer, config.model.vocab)
    except UserError as error:
        warn(f"{error}; config.json names no eos and no bos token")
        return None


class Described:
    """A folder of transformers: its model in our options, its checked tensors, its tokenizer.

    Args:
        warn: called for a tokenizer that cannot be read.

    Attributes:
        name: the family.
        config: with the folder's tokenizer, if it is of a kind of ours.
        untied: a head differs from the embedding, whatever config.json says about tying.
        found: returns the links of the parameters for a number of blocks.

    Raises:
        UserError: 414, the weights cannot be read, or are not those of that config.json; 415, our models do not support
            it, or it cannot be trained.
    """

    def __init__(self, source: Path, warn: Callable[[str], object]):
        path, described = source / "config.json", read_config(source)
        model = model_from_theirs(described, path)
        self.name, self.tokenizer = described["model_type"], _tokenizer_of(source, model.vocab, warn)
        config = _trainable(model, path, None if self.tokenizer is None else str(self.tokenizer.path))
        self.theirs = Theirs(source, families()[self.name], model.layers)
        self.untied = config.model.tie_embeddings and self.theirs.has_other_head()
        self.config = changed(config, {"model.tie_embeddings": config.model.tie_embeddings and not self.untied})
        shapes = whole_shapes(build_model(self.config))
        self.found = _links(self.name, self.config.model, shapes)
        self.theirs.take(self.found(model.layers), shapes)


def import_run(source: Path, folder: RunFolder, warn: Callable[[str], object], *, proven: bool) -> str:
    """Make a folder to train from: config.yaml with the model, the weights as step 0, the tokenizer, the proof.

    Everything is checked before anything is written, and the folder appears complete or not at all. A head that
    differs from the embedding is imported, whatever config.json says about tying.

    Args:
        warn: called for a tokenizer that cannot be imported; the weights are then imported without it.
        proven: compare the imported model with transformers'.

    Raises:
        UserError: 110, the folder exists; 403, it cannot be written; 414, the weights cannot be read, or are
            not those of that config.json; 415, our models do not support it, or it cannot be trained; 416, the
            imported model computes another function.
    """
    described = Described(source, warn)
    config, theirs, tokenizer = described.config, described.theirs, described.tokenizer
    files = {} if tokenizer is None else dict(tokenizer.files)
    named = None if tokenizer is None else str(folder.path / next(iter(files))) if files else str(tokenizer.path)
    config = changed(config, {"data.tokenizer": named})
    files |= generation_of(source)
    try:
        with new_folder(folder.path) as staging:
            store = Store(RunFolder(staging).checkpoints)
            options = {key: value for key, value in plain(config).items() if key.startswith("model.")}
            import_weights(theirs, store, options)
            dump(config, RunFolder(staging).config)
            step = store.path(0)
            sides = _sides(theirs, described.found, config.model, step, read_manifest(step), tokenizer)
            proof = prove(sides) if proven else Proof(reason="not asked for")
            for file, content in (files | {PROOF: proof.as_json(described.name)}).items():
                replace_file(staging / file, content)
    except FileExistsError:
        what = "holds a run already" if folder.config.exists() else "exists already"
        raise UserError(110, what, "give another --out", where=folder.path) from None
    except OSError as error:
        raise UserError(403, f"not imported: {error.strerror}", "give another --out", where=folder.path) from None
    own = f"data.train, {'' if named else 'data.tokenizer, '}data.valid and run.dir of your own"
    line = f"--config {folder.config} checkpoint.resume={folder.path}"
    taken = f" with {named}" if named else ""
    head = ", untied, as lm_head.weight is not the embedding" if described.untied else ""
    done = f"{folder.path}: {config.model.layers} layers of {described.name}{head}, step 0{taken}; {proof}"
    return f"{done}; train on it with {line} and {own}"


def _tokenizer_of(source: Path, vocab: int, warn: Callable[[str], object]) -> Tokenizer | None:
    """Return the tokenizer in a transformers folder; None: no kind of ours (no warning), or a bad one (a warning)."""
    path = source / "tokenizer.json"
    try:
        own = own_file(config_beside(path), read_tokenizer(path)) if path.exists() else None
        if own == NAME:
            return open_tokenizer(NAME, vocab)
        names = (source / (own or path.name), path, *sorted(source.glob("*.tiktoken")), source / "tokenizer.model")
        found = next((name for name in names if name.exists()), None)
        return None if found is None else open_tokenizer(found, vocab)
    except UserError as error:
        warn(f"{error}; the weights are imported without a tokenizer")
        return None


def _trainable(model: Model, where: Path, tokenizer: str | None) -> Config:
    """Return a config of the model. Raises UserError 415: a combination of values that the config's rules forbid."""
    config = resolved(Config(model=model, data=Data(tokenizer=tokenizer)))
    values = flatten(config)
    if broken := next(iter(broken_rules(values)), None):
        raise UserError(415, broken.broken(values), "this model cannot be trained: give another", where=where)
    return config
