"""The verbs export and import: convert a run to files of transformers, and such files to a folder for training."""

import json
from collections.abc import Callable
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.files import new_folder, replace_file
from megazero.builders.assemble import DTYPES, build_model
from megazero.builders.job import changed
from megazero.builders.pipeline import model_shape
from megazero.checkpoint.retention import verify
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_whole, require_shapes
from megazero.config.file import load
from megazero.config.flat import dump, flatten
from megazero.config.rules import broken_rules
from megazero.config.schema import Config, Data, Model, resolved
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.data.tokenizers.common import CONFIG, config_beside, read_tokenizer
from megazero.data.tokenizers.plain_bytes import NAME
from megazero.model.parameter import whole_shapes
from megazero.plan.layers import parameters
from megazero.run.folder import RunFolder
from megazero.tools.convert.hugging_face import config_to_theirs, family_of, links
from megazero.tools.convert.interop import Theirs, export, generation_of, import_weights, read_config
from megazero.tools.convert.tokenizer_files import for_transformers, own_file


def export_run(folder: RunFolder, target: Path, part_mb: int, warn: Callable[[str], object]) -> str:
    """Export the newest whole checkpoint of a run; return a line about the written files.

    Args:
        warn: called for each newer step that is damaged, and for a tokenizer that cannot be read.

    Raises:
        UserError: 113, the folder is not a run; 402, it has no checkpoint; 404, its checkpoint has another model; 410,
            the last one tried is damaged; 162 and 415, its tokenizer cannot be described; and those of `export`.
    """
    folder.require_run()
    config = load(str(folder.config))
    store, model = Store(folder.checkpoints), config.model.model_dump()
    manifest = newest_whole(store, verify, warn)
    source = store.path(manifest.step)
    family_of(model)  # reports a model that transformers lacks before shapes that differ because of it
    require_shapes(manifest, whole_shapes(build_model(config)), source)
    tokenizer = _tokenizer(config, warn)
    files: dict[str, bytes] = {}
    tokens: dict[str, int] = {}
    if tokenizer is not None:
        files = for_transformers(tokenizer)
        pad = tokenizer.specials.get(json.loads(files[CONFIG]).get("pad_token"))
        tokens = {"bos": tokenizer.bos, "eos": tokenizer.eod} | ({} if pad is None else {"pad": pad})
    # End-of-text ids belong to a tokenizer, so the file that names them is next to it.
    near = tokenizer.path.parent if tokenizer is not None and tokenizer.files else folder.path
    dtype = DTYPES[config.precision.dtype]
    theirs = config_to_theirs(model, str(dtype).removeprefix("torch."), tokens)
    files |= generation_of(near) | {"config.json": json.dumps(theirs, indent=1).encode()}
    count = export(source, manifest, links(model), dtype, target, files, part_mb << 20)
    carried = f", and its tokenizer {tokenizer.path}" if tokenizer is not None else ""
    return f"{target}: the weights of {source}, {count} file{'s' * (count > 1)}{carried}"


def _tokenizer(config: Config, warn: Callable[[str], object]) -> Tokenizer | None:
    """Return the run's tokenizer, or None with a warning: weights can be exported without it."""
    if config.data.tokenizer is None:
        return None
    try:
        return open_tokenizer(config.data.tokenizer, config.model.vocab)
    except UserError as error:
        warn(f"{error}; config.json names no eos and no bos token")
        return None


def import_run(source: Path, folder: RunFolder, warn: Callable[[str], object]) -> str:
    """Make a folder to train from: config.yaml with the model, the weights as step 0, the tokenizer.

    Everything is checked before anything is written, and the folder appears complete or not at all. A head that
    differs from the embedding is imported, whatever config.json says about tying.

    Args:
        warn: called for a tokenizer that cannot be imported; the weights are then imported without it.

    Raises:
        UserError: 110, the folder exists; 403, it cannot be written; 414, the weights cannot be read, or are
            not those of that config.json; 415, our models do not support it, or it cannot be trained.
    """
    model = read_config(source)
    tokenizer = _tokenizer_of(source, model.vocab, warn)
    files = {} if tokenizer is None else dict(tokenizer.files)
    named = None if tokenizer is None else str(folder.path / next(iter(files))) if files else str(tokenizer.path)
    config = _trainable(model, source / "config.json", named)
    theirs = Theirs(source, config.model.model_dump())
    untied = theirs.model["tie_embeddings"] != config.model.tie_embeddings
    config = changed(config, {"model.tie_embeddings": theirs.model["tie_embeddings"]})
    files |= generation_of(source)
    expected = parameters(model_shape(config))
    if theirs.numel != expected:
        what = f"config.json describes {expected:,} parameters, the files hold {theirs.numel:,}"
        raise UserError(414, what, "give the complete model of that config.json", where=source)
    theirs.check(whole_shapes(build_model(config)))
    try:
        with new_folder(folder.path) as staging:
            import_weights(theirs, Store(RunFolder(staging).checkpoints))
            dump(config, RunFolder(staging).config)
            for name, content in files.items():
                replace_file(staging / name, content)
    except FileExistsError:
        what = "holds a run already" if folder.config.exists() else "exists already"
        raise UserError(110, what, "give another --out", where=folder.path) from None
    except OSError as error:
        raise UserError(403, f"not imported: {error.strerror}", "give another --out", where=folder.path) from None
    own = f"data.train, {'' if named else 'data.tokenizer, '}data.valid and run.dir of your own"
    line = f"--config {folder.config} checkpoint.resume={folder.path}"
    taken = f" with {named}" if named else ""
    head = ", untied, as lm_head.weight is not the embedding" if untied else ""
    return f"{folder.path}: {config.model.layers} layers{head}, step 0{taken}; train on it with {line} and {own}"


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
