"""The verbs export and import: a run's weights to transformers' files, and theirs to a folder to train in."""

from pathlib import Path

from megazero.build import DTYPES
from megazero.checkpoint.interop import export, import_weights
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.retention import verify
from megazero.checkpoint.store import Store
from megazero.config import Config, Model, resolved
from megazero.config_file import dump, load
from megazero.errors import UserError
from megazero.run_folder import RunFolder


def export_run(folder: RunFolder, target: Path, part_mb: int) -> str:
    """Exports the newest checkpoint of a run; says what was written.

    Raises:
        UserError: 113, the folder is no run; 402, it has no checkpoint; and those of `export`.
    """
    if not folder.config.is_file():
        raise UserError(113, "is not a run's folder (no config.yaml)", "give --run runs/NAME", where=folder.path)
    config = load(str(folder.config))
    store = Store(folder.checkpoints)
    steps = store.steps()
    if not steps:
        raise UserError(402, "no checkpoint here", "has the run saved one?", where=folder.path)
    source = store.path(steps[0])
    verify(source)
    written = export(
        source,
        read_manifest(source),
        config.model.model_dump(),
        target,
        DTYPES[config.precision.dtype],
        part_mb << 20,
    )
    return f"{target}: the weights of {source}, {len(written)} file{'s' * (len(written) > 1)}"


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
    return f"{folder.path}: {config.model.layers} layers, step 0; train on it with checkpoint.resume={folder.path}"
