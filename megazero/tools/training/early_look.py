"""Check what a new run names before torch is imported: a wrong path is reported within a second; nothing is written.

Ranks that a launcher started check together, later, because a rank that ended here would leave the others waiting.
Faults of a resumed run belong in its log, so they are not checked here.
"""

from pathlib import Path

from megazero.base.packages import refuse_sinks
from megazero.config.flat import run_dir
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.data.joined import refuse_missing
from megazero.data.loss_mask import mask_path
from megazero.data.origin import require_mask, require_tokenizer
from megazero.data.tokenizer import open_tokenizer
from megazero.run.fitting import check_parts
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from megazero.tools.planning.micro_batch import sized


def look(config: Config, name: str, nproc: int | None) -> None:
    """Refuse a wrong number of ranks, missing packages, a folder in use, data that is missing or does not fit.

    Raises:
        UserError: 106, the ranks do not fit; 160 and 161, a package for metrics is not installed; 110, the folder
            holds a run; 420, a job trains there; 201, 228, data is missing; 112, 162, 209, 210, as `open_tokenizer`;
            203, 221, the data's record is damaged, or names another tokenizer; 225, a mask is missing.
    """
    if nproc is not None:
        done = 0 if config.checkpoint.resume == "none" else None
        check_parts(Course(sized(config, nproc)), nproc, f"--nproc {nproc}", done=done)
    refuse_sinks(wandb=config.observe.wandb is not None, tensorboard=config.observe.tensorboard)
    folder, data = RunFolder(run_dir(config, name)), config.data
    if config.checkpoint.resume == "none":
        folder.refuse_if_taken(RunLock(folder.lock))
    if folder.path.exists() or config.checkpoint.resume not in ("none", "auto"):
        return
    tokenizer = None if data.tokenizer is None else open_tokenizer(data.tokenizer, config.model.vocab)
    paths = [data.train, data.valid, *(each.path for each in data.validation or ())]
    paths += [source.path for source in Course(config).sources() or ()]
    for path in (path for path in paths if isinstance(path, str)):
        refuse_missing(path)
        origin = require_tokenizer(path, tokenizer)
        if not mask_path(path).exists():
            require_mask(origin, None, Path(path))
