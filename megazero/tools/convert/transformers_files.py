"""The verbs export and import: a run's weights to transformers' files, and theirs to a folder to train in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megazero.base.errors import UserError
from megazero.base.files import new_folder, replace_file
from megazero.build.assemble import DTYPES, build_model
from megazero.build.pipeline import model_shape
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_whole, require_shapes
from megazero.config.file import dump, flatten, load
from megazero.config.rules import broken_relations
from megazero.config.schema import Config, Data, Model, resolved
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.model.parameter import whole_shapes
from megazero.run.folder import RunFolder
from megazero.tools.convert.hugging_face import SpecialTokens, flavour_of
from megazero.tools.convert.interop import Theirs, export, import_weights, read_config


def export_run(folder: RunFolder, target: Path, part_mb: int, warn: Callable[[str], object]) -> str:
    """Export the newest whole checkpoint of a run; return what was written, in words.

    Args:
        warn: called about each newer step that is damaged, and of a tokenizer that cannot be read.

    Raises:
        UserError: 113, the folder is no run; 402, it has no checkpoint; 404, its checkpoint is of another model; 410,
            the last one tried is damaged; and those of `export`.
    """
    folder.require_run()
    config = load(str(folder.config))
    source = newest_whole(Store(folder.checkpoints), warn)
    manifest, model = read_manifest(source), config.model.model_dump()
    flavour_of(model)  # a model that transformers does not have is said before shapes that differ for it
    require_shapes(manifest, whole_shapes(build_model(config)), source)
    tokenizer = _tokenizer(config, warn)
    written = export(
        source,
        manifest,
        model,
        target,
        dtype=DTYPES[config.precision.dtype],
        part=part_mb << 20,
        tokens=SpecialTokens(None, None) if tokenizer is None else SpecialTokens(tokenizer.bos, tokenizer.eod),
        beside={} if tokenizer is None else tokenizer.files,
    )
    carried = f", and its tokenizer {tokenizer.path}" if tokenizer is not None and tokenizer.files else ""
    return f"{target}: the weights of {source}, {len(written)} file{'s' * (len(written) > 1)}{carried}"


def _tokenizer(config: Config, warn: Callable[[str], object]) -> Tokenizer | None:
    """Return the run's tokenizer; an export of weights does not fail for want of it."""
    if config.data.tokenizer is None:
        return None
    try:
        return open_tokenizer(config.data.tokenizer, config.model.vocab)
    except UserError as error:
        warn(f"{error}; config.json names no eos and no bos token")
        return None


def import_run(source: Path, folder: RunFolder, warn: Callable[[str], object]) -> str:
    """Make a folder that can be trained on: config.yaml with the model, the weights as its step 0, the tokenizer.

    Everything is looked at before anything is written, and the folder appears whole or not at all.

    Args:
        warn: called about a tokenizer that cannot be taken; an import of weights does not fail for want of it.

    Raises:
        UserError: 110, the folder holds something; 403, it cannot be written; 414, the weights cannot be read, or are
            not those of that config.json; 415, a model that is none of ours, or that nobody could train.
    """
    model = read_config(source)
    tokenizer = _tokenizer_of(source, model["vocab"], warn)
    files = {} if tokenizer is None else tokenizer.files
    config = _trainable(model, source / "config.json", folder.path / next(iter(files)) if files else None)
    theirs = Theirs(source, model)
    described = model_shape(config).parameters()
    if theirs.numel != described:
        what = f"config.json describes {described:,} parameters, the files hold {theirs.numel:,}"
        raise UserError(414, what, "is it a whole model of that config.json?", where=source)
    theirs.check(whole_shapes(build_model(config)))
    try:
        with new_folder(folder.path) as staging:
            import_weights(theirs, model, Store(RunFolder(staging).checkpoints))
            dump(config, RunFolder(staging).config)
            for name, content in files.items():
                replace_file(staging / name, content)
    except FileExistsError:
        what = "holds a run already" if folder.config.exists() else "exists already"
        raise UserError(110, what, "give another --out", where=folder.path) from None
    except OSError as error:
        raise UserError(403, f"not imported: {error.strerror}", "give another --out", where=folder.path) from None
    own = f"data.train, {'' if files else 'data.tokenizer, '}data.valid and run.dir of your own"
    line = f"--config {folder.config} checkpoint.resume={folder.path}"
    taken = f" with {config.data.tokenizer}" if files else ""
    return f"{folder.path}: {config.model.layers} layers, step 0{taken}; train on it with {line} and {own}"


def _tokenizer_of(source: Path, vocab: int, warn: Callable[[str], object]) -> Tokenizer | None:
    """Return the tokenizer in a folder of theirs; None: there is none of ours, which is not said, or a bad one."""
    names = (source / "tokenizer.json", *sorted(source.glob("*.tiktoken")), source / "tokenizer.model")
    if (path := next((path for path in names if path.exists()), None)) is None:
        return None
    try:
        return open_tokenizer(path, vocab)
    except UserError as error:
        warn(f"{error}; the weights are imported without a tokenizer")
        return None


def _trainable(model: dict[str, Any], where: Path, tokenizer: Path | None) -> Config:
    """Return a config of the model. Raises UserError 415: values that no model of ours can have together."""
    try:
        config = resolved(Config(model=Model(**model), data=Data(tokenizer=tokenizer and str(tokenizer))))
    except ValidationError as error:
        fault = error.errors()[0]
        what = f"model.{fault['loc'][0]}: {fault['msg']}, got {fault['input']!r:.40}"
        raise UserError(415, what, "nobody could train this model: give another", where=where) from None
    values = flatten(config)
    if broken := next(iter(broken_relations(values)), None):
        what = f"{broken.equation} is broken: {broken.got(values)}"
        raise UserError(415, what, "nobody could train this model: give another", where=where)
    return config
