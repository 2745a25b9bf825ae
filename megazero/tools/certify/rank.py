"""Record the results of one rank in a few steps of training, in a file for comparison."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from megazero.builders.assemble import Built
from megazero.comm.collectives import all_gather
from megazero.model.parameter import declarations_by_name
from megazero.zero.engine import Engine
from megazero.zero.placement import FlatBuffer, redistribute
from megazero.zero.unit import Unit


class Coded(TypedDict):
    """How a unit is sent as integers.

    Attributes:
        ranks: the ranks of the world among which it is sent.
        near: how many of them are neighbours, which sum first; all if there is one exchange.
        accumulate: for each recorded reduction whether its sum was added to the one before.
    """

    ranks: list[int]
    near: int
    accumulate: list[bool]


# With fp16 the second step overflows, because its loss is also scaled by `_MORE`. The loss scale starts at `SCALE`.
OVERFLOW, _MORE, SCALE = 1, 2.0**40, 2.0**16


@dataclass(frozen=True)
class Results:
    """The results of one rank.

    Attributes:
        losses, norms: of each step.
        skips: for each step whether it changed nothing, and the loss scale after it; lists, as in JSON.
        rows: for each split parameter this rank's first row and number of rows, without padding.
        stored: this rank's parts of all tensors, under "initial/NAME", "gradient/NAME", "weight/STEP/NAME"; the pieces
            that it would save are under "KIND/NUMBER": first (before training), weight, and the optimizer's state.
        held: (parameter, first element, one past the last) of the piece of each NUMBER.
        shapes: the whole shape of every parameter of the model.
        data_rank: number of the rank on the data axis.
        samples: for each step (id, `digest_of`) of each sample that this rank used.
        coded: how each unit that is sent as integers is sent (`codes.py`).
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rows: dict[str, Sequence[int]] = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)
    held: list[tuple[str, int, int]] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    data_rank: int = 0
    samples: list[list[tuple[int, str]]] = field(default_factory=list)
    skips: list[list[float]] = field(default_factory=list)
    coded: dict[str, Coded] = field(default_factory=dict)

    def tensors(self, kind: str) -> list[tuple[str, Tensor]]:
        """Return (NAME, tensor) for each tensor that is stored under "`kind`/NAME"."""
        return [(name[len(kind) + 1 :], t) for name, t in self.stored.items() if name.startswith(kind + "/")]

    def snapshots(self) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """Yield (kind, step from 0, tensors) in the order in which they were computed."""
        kinds = [("initial", 0), ("gradient", 0), *((f"weight/{step}", step) for step in range(len(self.losses)))]
        return ((kind, step, dict(self.tensors(kind))) for kind, step in kinds)


def load_results(folder: Path, rank: int) -> Results | None:
    """Return the results that a rank wrote into a folder; None if they are incomplete."""
    path = folder / f"{rank}.json"
    if not path.exists():
        return None
    return Results(**json.loads(path.read_text()), stored=load_file(folder / f"{rank}.safetensors"))


def write_results(results: Results, folder: Path, rank: int) -> None:
    """Write a rank's results into a folder."""
    save_file(results.stored, folder / f"{rank}.safetensors")
    numbers = {name: value for name, value in vars(results).items() if name != "stored"}
    (folder / f"{rank}.part").write_text(json.dumps(numbers))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")  # last: it marks the results as complete


def digest_of(tokens_S: Tensor, targets_S: Tensor, valid_S: Tensor) -> str:
    """Return a digest of a sample's tokens, targets and validity."""
    columns = torch.stack((tokens_S, targets_S, valid_S.to(torch.int64))).contiguous()
    return xxhash.xxh3_64_hexdigest(columns.numpy().tobytes())


def record(
    results: Results, built: Built, passes: Callable[[int], object], steps: int, lr: float, overflow: int
) -> None:
    """Train, and record this rank's results; finish a delayed update after the last step.

    Args:
        passes: runs forward and backward of a step.
        overflow: the step whose loss is scaled so that gradients overflow; -1: none.
    """
    engine, rows = built.engine, results.rows
    for name, d in declarations_by_name(built.model.named_parameters()).items():
        if d.split:
            rows[name] = (d.first_row, max(min(d.local_shape[0], d.shape[0] - d.first_row), 0))

    def note(kind: str, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in named:
            results.stored[f"{kind}/{name}"] = value[: rows[name][1] if name in rows else None].to("cpu", copy=True)

    note("initial", parameters_as_they_rest(engine))
    for step in range(steps):
        engine.begin_step()
        more = _MORE if step == overflow else 1.0
        engine.loss_scale.scale.mul_(more)
        passes(step)
        with reduced_gradients(engine) if step == 0 else nullcontext({}) as reduced:
            done = engine.finish_step(lr)
        engine.loss_scale.scale.div_(more)
        if step == 0:
            note("gradient", whole_gradients(reduced, done.mean))
        if step + 1 == steps:
            engine.flush_delayed()
        note(f"weight/{step}", parameters_as_they_rest(engine))
        results.losses.append(done.loss.item())
        results.norms.append(done.grad_norm.item())
        results.skips.append([bool(done.skipped), engine.loss_scale.scale.item()])


def parameters_as_they_rest(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield this tensor rank's part of all parameters; if gathers quantise them, the values before quantisation."""
    if not any(unit.parameters.gathering.rounds for unit in engine.units):
        yield from engine.named_parameters()
        return
    for unit in engine.units:
        whole = FlatBuffer(torch.empty(unit.numel, dtype=unit.resting.parameters.values.dtype, device=unit.device), {})
        redistribute(unit.resting.parameters, whole, "examination").wait()
        for interval in unit.layout.intervals:
            yield interval.name, whole.values[interval.start : interval.stop].view(interval.shape)


@contextmanager
def reduced_gradients(engine: Engine) -> Iterator[dict[Unit, Tensor]]:
    """Yield a dictionary that holds, after this context, each unit's reduced gradients before its update."""
    honest, found = engine.optimizer.update, dict[Unit, Tensor]()

    def update(unit: Unit, **how: Any) -> None:
        if not found:  # before any update: some of them change gradients
            for each in engine.units:
                with each.gradients.reduced_in_memory() as own:
                    found[each] = own.clone()
        honest(unit, **how)

    vars(engine.optimizer)["update"] = update
    yield found
    for unit in engine.units:
        unit.gradients.wait()  # until an update under way has ended
    vars(engine.optimizer)["update"] = honest


def whole_gradients(reduced: Mapping[Unit, Tensor], mean: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield this tensor rank's part of the gradient of the mean loss, before clipping.

    Args:
        mean: the factor of reduced gradients.
    """
    for unit, own in reduced.items():
        flat = own if len(own) == unit.numel else all_gather(own.contiguous(), unit.axes.shard, "examination")
        for interval in unit.layout.intervals:
            yield interval.name, flat[interval.start : interval.stop].view(interval.shape) * mean.to(flat.device)
