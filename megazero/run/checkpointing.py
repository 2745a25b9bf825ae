"""Choose the content of a run's checkpoints.

They hold the state of the engine as pieces of parameters, and in the manifest everything that is not a tensor. This
module sees the config, as builders/assemble.py does.
"""

import contextlib
import logging
import math
import shutil
from collections.abc import Callable, Iterator

from megazero.base.errors import UserError
from megazero.base.files import flush_file
from megazero.builders.assemble import Built, precision_of
from megazero.checkpoint import pieces
from megazero.checkpoint.manifest import WEIGHT, Logical, Manifest, WrittenShard, with_pieces
from megazero.checkpoint.pieces import ShardState
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.retention import retire
from megazero.checkpoint.save import Checkpoints
from megazero.checkpoint.shard import DTYPES, NAMES
from megazero.checkpoint.store import Store
from megazero.config.flat import plain
from megazero.config.stages import Course
from megazero.model.parameter import declaration_of, whole_shapes
from megazero.observe.sinks import warn
from megazero.plan.optimizers import AVERAGE
from megazero.run.resume import Start
from megazero.run.run import Run


def holdings_of(built: Built, *, saves: bool) -> list[ShardState]:
    """Return the states that this rank alone saves (`saves`), or all states that it updates (for loading)."""
    numel = {name: math.prod(shape) for name, shape in whole_shapes(built.model).items()}
    units, optimizer = built.engine.units, built.engine.optimizer
    if saves:  # of several copies, the first pipeline rank with one saves it
        units = [unit for unit in units if unit.axes.copies.rank == 0]
    return [each for unit in units for each in pieces.holdings_of(unit, optimizer.runs(unit), numel, saves=saves)]


def about_run(run: Run, start: Start, built: Built, data: str, tokenizer: str | None) -> Manifest:
    """Return a manifest with the content that all manifests of this run share: step 0, no files, no progress.

    Args:
        start: gives the run's id and history; the history gets an entry if `data` differs from `start.data`.
        data, tokenizer: digests of the data and the tokenizer; None for no tokenizer.
    """
    config, history = run.config, list(start.history)
    if start.data not in (None, data):  # other data than before, which `--allow-change` permits
        history.append({"step": start.at, "key": "data", "from": start.data, "to": data})
    assert config.zero.stage is not None, "a resolved config"
    precision, moments = precision_of(config), [k for k in built.engine.optimizer.kinds if k != AVERAGE]
    sizes = {name: run.grid[name].size for name in ("tensor", "pipeline", "data")}
    return Manifest.new(
        run=start.run,
        grid={**sizes, "stage": config.zero.stage},
        dtype=NAMES[precision.masters],
        kinds=(kinds := [WEIGHT, *built.engine.optimizer.kinds]),
        dtypes={} if precision.state == precision.masters else dict.fromkeys(moments, NAMES[precision.state]),
        tensors=dict(_logical(built, kinds)),
        random={"seed": config.run.seed, "of": "seed, step, sample, layer, site and position; no state"},
        identity={"data": data, "tokenizer": tokenizer},
        config=plain(config),
        history=history,
    )


def _logical(built: Built, kinds: list[str]) -> Iterator[tuple[str, Logical]]:
    """Yield each parameter of the model, with its kinds of values if they are not all of these."""
    for name, parameter in built.model.named_parameters():
        declared = declaration_of(parameter)
        own = [WEIGHT, *built.optimizers.states(built.optimizers.of(name, hidden=declared.matrix is not None)[0])]
        yield name, Logical(shape=list(declared.shape), pieces=[], kinds=None if own == kinds else own)


def checkpoints_of(run: Run, start: Start, built: Built, about: Manifest) -> Checkpoints:
    """Return the object that saves this rank's part of the run; rank 0 commits."""
    store = Store(run.folder.checkpoints, start.word)
    options, log = run.config.checkpoint, logging.getLogger("megazero")

    def conclude(step: int, progress: Progress, parts: list[WrittenShard]) -> None:
        written = {"tensors": with_pieces(about.tensors, parts), "files": [part.shard for part in parts]}
        manifest = about.model_copy(update={"step": step, "progress": progress, **written})
        _require_ours(run, step)
        with contextlib.suppress(OSError):
            flush_file(run.folder.metrics)  # a step that survives a power cut has its rows before it
        log.info("saved %s", store.commit(step, manifest.to_bytes()))

    def tidy(stop: Callable[[], bool]) -> None:
        if options.keep is not None and run.lock.held:
            retire(store, options.keep, warn, stop)

    checkpoints = Checkpoints(
        store,
        holdings_of(built, saves=True),
        run.grid["world"],
        run.device,
        every=options.every,
        background=options.async_,
        conclude=conclude if run.is_first else None,
        tidy=tidy if run.is_first else None,
    )
    run.grid.comm.ledger.hold("checkpoint", checkpoints.copy_bytes)
    return checkpoints


def _require_ours(run: Run, step: int) -> None:
    """Refuse to commit into a folder that is gone, or whose lock this job has lost.

    Raises:
        UserError: 423, the folder was deleted or moved; 421, the lock is lost.
    """
    path = run.folder.path
    if not path.is_dir():
        what = "checkpoint not saved: the run's folder was deleted or moved during training"
        do = "move it back and go on with checkpoint.resume=auto, or start again in another run.dir"
        raise UserError(423, what, do, where=path, step=step)
    if (loss := run.lock.loss()) is not None:
        do = "make sure that only one job trains here, and go on with checkpoint.resume=auto"
        raise UserError(421, loss, do, where=path, step=step)


def check_space(run: Run, about: Manifest) -> None:
    """Refuse a run whose checkpoints do not fit on the disk, before there is training to lose.

    Raises:
        UserError: 403, there is no room for one checkpoint, or for two if the run saves several.
        OSError: the disk does not answer.
    """
    kinds = ((name, logical.numel, kind) for name, logical in about.tensors.items() for kind in about.kinds_of(name))
    one = sum(numel * DTYPES[about.dtype_of(name, kind)].itemsize for name, numel, kind in kinds)
    folder, several = run.folder.checkpoints, run.config.checkpoint.every is not None
    several = several or len(Course(run.config, about.history).parts) > 1
    needed = one * (2 if several else 1)
    if (free := shutil.disk_usage(folder).free) < needed:
        what = f"expected room for {needed / 1e9:.3g} GB of checkpoints ({one / 1e9:.3g} GB each)"
        what += f", got {free / 1e9:.3g} GB"
        raise UserError(403, what, "free space there, or give another run.dir", where=folder)
