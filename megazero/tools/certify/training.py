"""Train one rank with the certificate's own settings, and keep everything that is compared."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megazero.builders.assemble import DTYPES, Built, StageInputs, build, feeds_of, grid_of
from megazero.builders.job import changed
from megazero.builders.pipeline import model_shape
from megazero.checkpoint.pieces import Piece, ShardState
from megazero.comm.context import CommContext
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.config.schema import Config, OptimizerGroup
from megazero.config.stages import Course, Part
from megazero.data.batch import MicroBatch
from megazero.data.windows import WindowTokens
from megazero.extensions.homes import HOMES
from megazero.kernels.select import choose
from megazero.launcher.world import World
from megazero.model.parameter import whole_shapes
from megazero.plan.layers import parameters
from megazero.run.build import loader_of
from megazero.run.checkpointing import holdings_of
from megazero.run.data import RunData, open_data
from megazero.run.disks import open_disks
from megazero.tools.certify.codes import record_codes
from megazero.tools.certify.rank import OVERFLOW, Results, digest_of, record
from megazero.tools.certify.reference import follow
from megazero.tools.certify.tolerances import BETAS, CLIP, DECAY, LR, VECTORS, eps_of


@dataclass
class Rig:
    """The objects that train on one rank, built but not started; a planted fault changes one of them.

    Attributes:
        batches: step -> this rank's micro-batches.
        feed: (micro-batch, step, training) -> the inputs of the stages.
        holdings: returns the states that this rank would save.
    """

    grid: Grid
    built: Built
    batches: Callable[[int], list[MicroBatch]]
    feed: Callable[[MicroBatch, int, bool], StageInputs]
    holdings: Callable[[], list[ShardState]]


Plant = Callable[[Rig], object]


def nothing(rig: Rig) -> None:
    """Plant no fault."""


def settings(config: Config) -> Config:
    """Return the config with the certificate's optimizer settings (`tools/certify/tolerances.py` has the reasons)."""
    eps = eps_of(parameters(model_shape(config)))
    slow = [OptimizerGroup(match=match, lr_factor=VECTORS) for match in ("*norm.weight", "*bias", "*positions.weight")]
    groups = (*(config.optimizer.groups or ()), *slow)  # the first match counts
    chosen = {"lr": LR, "betas": BETAS, "eps": eps, "weight_decay": DECAY, "clip": CLIP, "groups": groups}
    return changed(config, {f"optimizer.{name}": value for name, value in chosen.items()})


def train_rank(comm: CommContext, world: World, config: Config, steps: int, plant: Plant = nothing) -> Results:
    """Train, and return this rank's results.

    Args:
        config: has the `settings` of the certificate.
        plant: changes objects of the rig before the first step.
    """
    grid, device = grid_of(config, comm, world), torch.device("cpu")
    host = Host(device, comm.ledger, apart=True)  # otherwise nothing would be offloaded
    ops = choose(config.precision.kernels, device, DTYPES[config.precision.dtype])
    disks = open_disks(HOMES, config, device, comm.ledger)
    built = build(config, grid, device, ops, host, homes={"nvme": disks} if disks else {})
    data, first = _opened(config)
    loader = loader_of(first, data, grid["data"], device)
    feed = feeds_of(grid["tensor"], device, config.parallel.sequence)
    rig = Rig(grid, built, loader.step, feed, lambda: holdings_of(built, saves=True))
    plant(rig)
    results = _recorded(rig, config, steps)
    loader.close()
    if disks is not None:
        disks.close()
    return results


def follow_rank(config: Config, steps: int, *, late: bool) -> Results:
    """Train the independent reference, and return its results.

    Args:
        late: forward uses weights that lack the last update.
    """
    data, _ = _opened(config)
    return follow(config, data.mixture, steps, late=late)


def _opened(config: Config) -> tuple[RunData, Part]:
    """Return the data of a certificate, and the single part of its run that reads it (stages are ignored).

    Every other window is cut into documents of at most a third of its length, because the text may have no short ones.
    """
    course = Course(config.model_copy(update={"stages": None}))
    data = open_data(config, course)
    for source in data.mixture.sources:
        source.windows.read = _with_more_ends(source.windows.read)  # type: ignore[method-assign]
    return data, course.parts[0]


def _with_more_ends(read: Callable[[int], WindowTokens]) -> Callable[[int], WindowTokens]:
    def cut(window: int) -> WindowTokens:
        found = read(window)
        pieces = 3 * np.arange(len(found.ordinals)) // len(found.ordinals) * (window % 2)
        return found._replace(ordinals=np.where(found.ordinals < 0, found.ordinals, 3 * found.ordinals + pieces))

    return cut


def _recorded(rig: Rig, config: Config, steps: int) -> Results:
    results = Results(shapes=whole_shapes(rig.built.model), data_rank=rig.grid["data"].rank)

    def passes(step: int) -> None:
        seen: dict[int, MicroBatch] = {}  # a rank with two stages feeds a micro-batch twice

        def feed(batch: MicroBatch) -> StageInputs:
            seen[id(batch)] = batch
            return rig.feed(batch, step, True)

        rig.built.pipeline.train(rig.batches(step), feed)
        results.samples.append([sample for batch in seen.values() for sample in _samples(batch)])

    before = [values["weight"].clone() for _, values in _held(rig)]
    record_codes(rig.built.engine.units, results)
    overflow = OVERFLOW if config.precision.dtype == "fp16" else -1
    record(results, rig.built, passes, steps, config.optimizer.lr, overflow)
    for number, (first, (piece, values)) in enumerate(zip(before, _held(rig), strict=True)):
        results.held.append((piece.name, piece.start, piece.stop))
        for kind, value in {"first": first, **values}.items():
            results.stored[f"{kind}/{number}"] = value.clone()
    return results


def _held(rig: Rig) -> list[tuple[Piece, dict[str, Tensor]]]:
    """Return each piece that this rank would save, with its elements in each kind of tensor."""
    return [
        (piece, {kind: _values(holding, flat, piece) for kind, flat in holding.tensors.items()})
        for holding in rig.holdings()
        for piece in holding.pieces
    ]


def _values(holding: ShardState, flat: Tensor, piece: Piece) -> Tensor:
    """Return the elements of a piece; those on a disk are copied to new memory."""
    there = flat[piece.at : piece.at + piece.stop - piece.start]
    if holding.disks is None:
        return there
    found = torch.empty(len(there), dtype=there.dtype)
    holding.disks.bring(there, found, "examination")
    return found


def _samples(batch: MicroBatch) -> list[tuple[int, str]]:
    """Return the id of each sample, and a digest of its tokens, targets and validity."""
    columns = zip(batch.tokens_SB.T, batch.targets_SB.T, batch.valid_SB.T, strict=True)
    return [(id_, digest_of(*column)) for id_, column in zip(batch.sample_ids_B.tolist(), columns, strict=True)]
