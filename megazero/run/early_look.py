"""Check what a new run names before torch is imported: a wrong path is reported within a second, and leaves nothing.

Where a launcher started the ranks, all of them check together, later: one that ended here would leave the others
waiting. The faults of a run that goes on belong in its log, so they are not checked here.
"""

from pathlib import Path

from megazero.build.pipeline import check_world
from megazero.config.file import run_dir
from megazero.config.schema import Config
from megazero.data.indexed_dataset import refuse_missing
from megazero.data.loss_mask import mask_path
from megazero.data.origin import require_mask, require_tokenizer
from megazero.data.tokenizer import open_tokenizer
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock


def look(config: Config, name: str, nproc: int | None) -> None:
    """Refuse wrong numbers of ranks, a folder that is taken, data not there, a tokenizer or mask that does not fit.

    Raises:
        UserError: 106; 110, 420; 201; 162, 209, 210, 112; 203, 221, 225.
    """
    if nproc is not None:
        check_world(config, nproc, f"--nproc {nproc}")
    folder, data = RunFolder(run_dir(config, name)), config.data
    if config.checkpoint.resume == "none":
        folder.refuse_if_taken(RunLock(folder.lock))
    if folder.path.exists() or config.checkpoint.resume not in ("none", "auto"):
        return
    tokenizer = None if data.tokenizer is None else open_tokenizer(data.tokenizer, config.model.vocab)
    for path in _paths(config):
        refuse_missing(path)
        origin = require_tokenizer(path, tokenizer)
        if not mask_path(path).exists():
            require_mask(origin, None, Path(path))


def _paths(config: Config) -> list[str]:
    """Return the path of every data set that a config names."""
    data = config.data
    paths = [data.train, data.valid] + [each.path for each in (*(data.sources or ()), *(data.validation or ()))]
    paths += [source.path for stage in config.stages or () if stage.data for source in stage.data.sources]
    return [path for path in paths if isinstance(path, str)]
