"""`megazero simulate`: what one rank without any other counts is what the same rank of a real run counts, to the byte."""

from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megazero.build import build, feeds_of
from megazero.data.loader import MicroBatch
from megazero.kernels.operations import REFERENCE
from megazero.model.transformer import Shape
from megazero.observe.allocations import Allocations
from megazero.parallel.grid import Grid
from megazero.parallel.host import Host
from megazero.parallel.nobody import alone
from megazero.parallel.signals import Signals
from megazero.simulation import ToldLedger, two_steps
from megazero.stopping import Stopping
from megazero.zero.placement import Precision
from tests.layouts import CPU, Layout, rewired

DTYPES = {
    "fp32": Precision(),
    "fp64": Precision(torch.float64, torch.float64),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float16),
}


def real(grid: Grid, layout: Layout, shape: Shape, precision: Precision) -> dict[str, Any]:
    """What a rank counts in two steps among the others."""
    grid, config = rewired(grid, layout), layout.config(shape, precision)
    ledger = grid.world.wire.ledger
    built = build(config, grid, CPU, REFERENCE, Host(CPU, ledger, apart=True))
    feed = feeds_of(grid.tensor, CPU, layout.sequence)
    stopping = Stopping(grid.world, CPU, Signals(), Path("nowhere"), None)
    for number in range(2):
        batches = [zeros(shape, layout.micro) for _ in range(layout.accumulation)]
        with Allocations() as counted:
            built.engine.begin_step()
            built.pipeline.train(batches, lambda batch, number=number: feed(batch, number, True))
            built.engine.finish_step(1e-3)
            stopping.ask(failed=False, saving=0.0)
    return {"bytes": ledger.bytes_as_dict(), "traffic": ledger.traffic_as_dict(), "activations": counted.peak}


def zeros(shape: Shape, micro: int) -> MicroBatch:
    tokens, targets = (torch.zeros(shape.seq_len, micro, dtype=torch.int64) for _ in range(2))
    return MicroBatch(tokens, targets, torch.ones_like(tokens, dtype=torch.bool), None, None, torch.arange(micro))


def simulated(rank: int, layout: Layout, shape: Shape, precision: Precision) -> dict[str, Any]:
    with FakeTensorMode():
        axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "bucket": layout.bucket}
        grid = rewired(alone(rank, layout.size, backend="gloo", ledger=ToldLedger(), **axes), layout)
        host = Host(CPU, grid.world.wire.ledger, apart=True)
        found = two_steps(layout.config(shape, precision), grid, REFERENCE, host, "cpu")
    held = found.ledger.bytes_as_dict()
    activations = held.pop("activations")["peak"]
    return {"bytes": held, "traffic": found.ledger.traffic_as_dict(), "activations": activations}
