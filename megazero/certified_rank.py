"""One rank's part of a certificate: a few steps of training, and a file of all that they computed."""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megazero.build import DTYPES, Built, bucket_of, build, feeds_of, grid_of, loader_of
from megazero.data.loader import open_datasets
from megazero.kernels.choice import choose
from megazero.model.parameter import declaration_of
from megazero.parallel.collectives import all_gather
from megazero.parallel.grid import Grid
from megazero.parallel.launch import Place
from megazero.parallel.rendezvous import connect, disconnect
from megazero.zero.clip import clip_factor
from megazero.zero.engine import Engine

if TYPE_CHECKING:
    from megazero.config import Config

# An element whose gradient is near zero moves by up to the learning rate, whichever sign rounding gives it; among
# millions of elements there are some. The tolerances of weights are made for at most 1e-3.
LARGEST_LR = 1e-4


@dataclass(frozen=True)
class Results:
    """What one rank computed.

    Attributes:
        losses, norms: of each step.
        rows: of each parameter that is split the first row that this rank has, and how many, padding left out.
        stored: its parts of all tensors, by "initial/NAME", "gradient/NAME", "weight/STEP/NAME".
    """

    losses: list[float]
    norms: list[float]
    rows: dict[str, tuple[int, int]]
    stored: dict[str, Tensor]

    def tensors(self, kind: str) -> list[tuple[str, Tensor]]:
        """(name, this rank's part) of each of a kind."""
        return [(name[len(kind) + 1 :], t) for name, t in self.stored.items() if name.startswith(kind + "/")]

    def snapshots(self) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """(kind, step from 0, tensors) in the order in which they were computed."""
        kinds = [("initial", 0), ("gradient", 0), *((f"weight/{step}", step) for step in range(len(self.losses)))]
        return ((kind, step, dict(self.tensors(kind))) for kind, step in kinds)


def train_rank(place: Place, config: Config, steps: int, folder: Path) -> None:
    """Trains, and writes this rank's results into the folder."""
    torch.set_num_threads(1)  # sums do not depend on how many there are
    wire = connect(place, timeout=timedelta(seconds=config.parallel.timeout), fingerprint="", bucket=bucket_of(config))
    grid = grid_of(config, wire, place.world)
    write_results(_train(config, grid, steps), folder, grid.world.rank)
    disconnect()


def load_results(folder: Path, rank: int) -> Results:
    numbers = json.loads((folder / f"{rank}.json").read_text())
    rows = {name: (first, count) for name, (first, count) in numbers.pop("rows").items()}
    return Results(**numbers, rows=rows, stored=load_file(folder / f"{rank}.safetensors"))


def write_results(results: Results, folder: Path, rank: int) -> None:
    numbers = {name: getattr(results, name) for name in ("losses", "norms", "rows")}
    save_file(results.stored, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(numbers))  # last: where it is, all is there


def _train(config: Config, grid: Grid, steps: int) -> Results:
    device = torch.device("cpu")
    built = build(config, grid, device, choose(config.precision.kernels, device, DTYPES[config.precision.dtype]))
    feed = feeds_of(grid.tensor, device, config.parallel.sequence)
    data, model = config.data, config.model
    train, _ = open_datasets(data.train, data.valid, model.seq_len, model.vocab, data.mask_eod)
    loader = loader_of(config, train, grid.data)
    results = record(
        built,
        lambda step: built.pipeline.train(loader.step(step), lambda batch: feed(batch, step, True)),
        steps,
        min(config.optimizer.lr, LARGEST_LR),
        config.optimizer.clip,
    )
    loader.close()
    return results


def record(built: Built, passes: Callable[[int], object], steps: int, lr: float, clip: float) -> Results:
    """Trains, and notes what this rank computed.

    Args:
        passes: forward and backward of a step.
        clip: of the config.
    """
    engine = built.engine
    declarations = {name: declaration_of(parameter) for name, parameter in built.model.named_parameters()}
    rows = {
        name: (d.first_row, max(min(d.local_shape[0], d.shape[0] - d.first_row), 0))
        for name, d in declarations.items()
        if d.split
    }
    results = Results([], [], rows, {})

    def note(kind: str, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in named:
            kept = value[: rows[name][1]] if name in rows else value
            results.stored[f"{kind}/{name}"] = kept.clone()

    note("initial", engine.named_parameters())
    for step in range(steps):
        engine.begin_step()
        passes(step)
        done = engine.finish_step(lr)
        if step == 0:  # the update has multiplied them by the clip factor, which depends on all others
            factor = clip_factor(done.grad_norm, clip)
            note("gradient", ((name, value / factor.to(value.device)) for name, value in reduced_gradients(engine)))
        note(f"weight/{step}", engine.named_parameters())
        results.losses.append(done.loss.item())
        results.norms.append(done.grad_norm.item())
    return results


def reduced_gradients(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """This tensor rank's part of the reduced gradients, from wherever they rest."""
    for unit in engine.units:
        own = unit.reduced_gradients
        flat = own if len(own) == unit.numel else all_gather(own.contiguous(), engine.spread.data, "examination")
        for interval in unit.layout.intervals:
            yield interval.name, flat[interval.start : interval.stop].view(interval.shape)
