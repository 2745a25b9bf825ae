"""The verbs export and import: a run's weights to transformers' files, and theirs to a folder to train in."""

from collections.abc import Callable
from pathlib import Path

from megazero.build import DTYPES
from megazero.build_run import open_tokenizer
from megazero.checkpoint.hugging_face import SpecialTokens
from megazero.checkpoint.interop import export, import_weights
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_whole
from megazero.config import Config, Model, resolved
from megazero.config_file import dump, load
from megazero.errors import UserError
from megazero.run_folder import RunFolder


def export_run(folder: RunFolder, target: Path, part_mb: int, warn: Callable[[str], object]) -> str:
    """Exports the newest whole checkpoint of a run; says what was written.

    Args:
        warn: told of each newer step that is damaged, and of a tokenizer that cannot be read.

    Raises:
        UserError: 113, the folder is no run; 402, it has no checkpoint; 410, the last one tried is damaged; and those
            of `export`.
    """
    if not folder.config.is_file():
        raise UserError(113, "is not a run's folder (no config.yaml)", "give --run runs/NAME", where=folder.path)
    config = load(str(folder.config))
    source = newest_whole(Store(folder.checkpoints), warn)
    written = export(
        source,
        read_manifest(source),
        config.model.model_dump(),
        target,
        dtype=DTYPES[config.precision.dtype],
        part=part_mb << 20,
        tokens=_special_tokens(config, warn),
    )
    return f"{target}: the weights of {source}, {len(written)} file{'s' * (len(written) > 1)}"


def _special_tokens(config: Config, warn: Callable[[str], object]) -> SpecialTokens:
    """Those of the run's tokenizer; an export of weights does not fail for want of it."""
    if config.data.tokenizer is None:
        return SpecialTokens(None, None)
    try:
        tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab)
    except UserError as error:
        warn(f"{error}; config.json names no eos and no bos token")
        return SpecialTokens(None, None)
    return SpecialTokens(tokenizer.bos, tokenizer.eod)


def import_run(source: Path, folder: RunFolder) -> str:
    """Makes a folder that can be trained on: config.yaml with the model, and the weights as its step 0.

    Raises:
        UserError: 110, the folder holds a run; and those of `import_weights`.
    """
    if folder.config.exists() or Store(folder.checkpoints).steps():
        raise UserError(110, "holds a run already", "give another --out", where=folder.path)
    model = import_weights(source, Store(folder.checkpoints))
    config = resolved(Config(model=Model(**model)))
    dump(config, folder.config)
    return f"{folder.path}: {config.model.layers} layers, step 0; train on it with " + (
        f"--config {folder.config} checkpoint.resume={folder.path}, data.train and a run.dir of its own"
    )
