"""Combine parts of this library with your own: a block, a source of batches, an optimizer, a callback, a sink.

    python examples/own_parts.py

There is no config and no run folder: each part is an object made from plain values. The block has its own parameter
and delivers that parameter's gradient itself, as all our layers do (megazero/model/contract.py).
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

from megazero.builders.units import build_units, resources_of
from megazero.comm.grid import Axis, Grid, single
from megazero.data.batch import MicroBatch
from megazero.kernels.operations import REFERENCE
from megazero.model.batch_context import BatchContext
from megazero.model.parameter import declare
from megazero.model.tape import Tape, apply
from megazero.model.transformer import Shape, Transformer
from megazero.observe.sinks import Sink, Sinks
from megazero.optim.groups import Groups
from megazero.optim.optimizer import Run
from megazero.zero.engine import Engine, StepNumbers
from megazero.zero.placement import STAGES, Precision, UnitAxes, ZeroStage
from megazero.zero.unit import Unit

VOCAB, LENGTH, WIDTH = 32, 16, 16
Callback = Callable[[int, StepNumbers], object]


class Gate:
    """Compute y = x + gate (f(x) - x), with its own backward; the gate has one number per column."""

    def __init__(self, module: nn.Module):
        self.owners: list[dict[str, Any]] = [module._parameters]

    def run(self, tape: Tape, x: Tensor, f: Tensor) -> Tensor:
        """Return y [S, B, D]."""
        gate = self.owners[0]["weight"]
        tape.keep((tape.use(gate), f - x), gate)
        return torch.lerp(x, f, gate)

    def back(self, tape: Tape, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and f; deliver the gate's."""
        (slot, difference), gate = tape.take(), tape.weights.pop()
        slot.add_sum((slope * difference).flatten(0, 1))
        return slope * (1.0 - gate), slope * gate


class GatedBlock(nn.Module):
    """A transformer block and a gate between its input and its output."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block, self.weight = block, declare((WIDTH,), mean=0.5)
        self._gate = Gate(self)

    def forward(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        return apply(self._gate, x_SBD, self.block(x_SBD, step))


class CountingTokens:
    """A source of batches: tokens that count up in steps of 1; a pure function of the step and the rank."""

    def __init__(self, samples: int, rank: int, ranks: int):
        self._samples, self._rank, self._ranks = samples, rank, ranks

    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step on this rank."""
        first = step * self._samples * self._ranks + self._rank * self._samples
        ids = torch.arange(first, first + self._samples)
        window = (7 * ids + torch.arange(LENGTH + 1)[:, None]) % VOCAB
        valid = torch.ones(LENGTH, self._samples, dtype=torch.bool)
        return [MicroBatch(window[:-1], window[1:], valid, None, None, ids)]


class Momentum:
    """Stochastic gradient descent with momentum, over the flat shards of units (megazero/optim/optimizer.py)."""

    kinds = ("velocity",)

    def __init__(self, units: list[Unit], decay: float = 0.9):
        self._decay = decay
        self._velocity = {unit: unit.resting.new_state(len(unit.masters)) for unit in units}

    def runs(self, unit: Unit) -> list[Run]:
        """Return the state of this rank's shard: one value for each element."""
        velocity = self._velocity[unit]
        return [Run(slice(0, len(velocity)), "momentum", {"velocity": velocity})]

    def pieces(self, unit: Unit) -> tuple[()]:
        """Return no pieces that count their updates: momentum needs none."""
        return ()

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update this rank's shard; change nothing if `skip` is 1."""
        velocity, goes = self._velocity[unit], (1.0 - skip).to(unit.masters.dtype)
        gradient = unit.gradients.reduced.to(velocity.dtype) * scale.to(velocity.dtype)
        velocity.lerp_(velocity * self._decay + gradient, goes)
        unit.masters.add_(velocity * goes, alpha=-lr)
        unit.resting.round_masters()


class Printed(Sink):
    """A sink that prints the loss of each row."""

    def start(self) -> None:
        print("step  loss")

    def row(self, row: Mapping[str, Any]) -> None:
        print(f"{row['step']:4}  {row['loss']:.4f}")


def build(grid: Grid, stage: ZeroStage, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Engine]:
    """Return a model of gated blocks, and the engine that owns its parameters."""
    sizes = {"layers": 2, "hidden": WIDTH, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": VOCAB, "seq_len": LENGTH}
    kinds = {"position": "learned", "norm": "layernorm", "activation": "gelu", "dropout": 0.0, "tie_embeddings": True}
    shape = Shape(**sizes, **kinds, norm_eps=1e-5)  # type: ignore[arg-type]
    model = Transformer(shape, seed=0, tensor=Axis("tensor"), sequence=False, ops=REFERENCE)
    model.blocks = nn.ModuleList(GatedBlock(block) for block in model.blocks)
    model.layers[1:-1] = list(model.blocks)
    names = [name for name, _ in model.units()]
    axes = UnitAxes(shard=grid["shard"], tensor=grid["tensor"], stage=stage, replica=grid["replica"])
    resources = resources_of(Precision(dtype, dtype), torch.device("cpu"), grid.comm.ledger)
    units = build_units(model, names, Groups("momentum", 0.0), seed=0, axes=lambda _: axes, resources=resources)
    told = {"clips": [1.0], "tokens_per_step": 4 * LENGTH, "grid": grid, "scaling": False, "ops": REFERENCE}
    engine = Engine([names], units, names, Momentum(units), **told)
    model.layers[:] = engine.shard_layers(engine.stages[0], model.layers, model.units_of_layers(), keep_last=True)
    return model, engine


def train(model: Transformer, engine: Engine, source: CountingTokens, steps: int, lr: float, after: Callback) -> None:
    """Train for `steps` steps; call `after(step, numbers)` after each, with steps counted from 1."""
    (stage,) = engine.stages
    for number in range(steps):
        engine.begin_step()
        batches = source.step(number)
        for m, batch in enumerate(batches):
            stage.forward(m)
            losses = model.losses(
                batch.tokens_SB, batch.targets_SB, batch.valid_SB, BatchContext(number, batch.sample_ids_B)
            )
            last = m == len(batches) - 1
            stage.backward(m, engine.loss(losses, batch.valid_SB).backward, reduce=True, last=last)
        stage.finish_reduction()
        after(number + 1, StepNumbers.of(engine.finish_step(lr).packed.tolist()))


def main() -> None:
    grid = single()
    model, engine = build(grid, STAGES[2])
    sinks = Sinks([Printed()])
    sinks.start()

    def after(step: int, numbers: StepNumbers) -> None:
        if step % 10 == 0:
            sinks.row({"step": step, "loss": numbers.loss})

    train(model, engine, CountingTokens(4, grid["data"].rank, grid["data"].size), 50, 0.05, after)
    sinks.close()


if __name__ == "__main__":
    main()
