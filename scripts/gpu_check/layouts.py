"""A tiny GPT in a few layouts: what each is made of, the text it reads, and one rank's part of training it.

Everything between the settings and the numbers is what a run of train.py uses; only the package that checks configs is
left out, so that a machine without it can be checked too.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megazero.build.assemble import build, feeds_of
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.data.loader import MicroBatch
from megazero.data.sampler import index_of, sample_id
from megazero.kernels.operations import REFERENCE
from megazero.tools.certify.rank import Results, record

if TYPE_CHECKING:
    from megazero.config.schema import Config

GLOBAL_BATCH, STEPS, CLIP = 8, 3, 0.5
LR = 1e-4  # an element whose gradient is near zero moves by up to that, whichever sign rounding gives it
HEADS = 4
MODEL = {
    "layers": 4,
    "hidden": 64,
    "heads": HEADS,
    "kv_heads": HEADS,
    "ffn": 256,
    "vocab": 251,  # does not divide by two: the last tensor rank pads
    "seq_len": 32,
    "position": "learned",
    "norm": "layernorm",
    "activation": "gelu",
    "dropout": 0.1,
    "tie_embeddings": True,
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}


@dataclass(frozen=True)
class Layout:
    """The layout of the model, in the words of a config.

    Attributes:
        micro: sequences in a micro-batch.
        memory, offload: options of activations, and of optimizer state and parameters.
    """

    name: str
    dtype: str = "fp32"
    stage: int = 0
    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    sequence: bool = False
    micro: int = GLOBAL_BATCH
    memory: dict[str, str | bool] = field(default_factory=dict)
    offload: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def folder(self) -> str:
        """Return the name of the folder of its results."""
        return f"{self.name}, {self.dtype}"


def config_of(layout: Layout, model: dict[str, Any] = MODEL, batch: int = GLOBAL_BATCH) -> "Config":
    """Return the same as `settings`, in the form of a checked config."""
    return _named(settings(layout, model, batch))


def settings(layout: Layout, model: dict[str, Any] = MODEL, batch: int = GLOBAL_BATCH) -> dict[str, dict[str, Any]]:
    """Return the options that decide what is computed, by section.

    Args:
        batch: sequences in a step.
    """
    return {
        "run": {"seed": 0},
        "model": model,
        "parallel": {"tensor": layout.tensor, "pipeline": layout.pipeline, "sequence": layout.sequence},
        "zero": {
            "stage": layout.stage,
            "grad_dtype": "fp32",
            "offload": {"optimizer": "none", "parameters": "none", "delayed": False} | layout.offload,
        },
        "memory": {"recompute": "none", "partition": False, "offload": False} | layout.memory,
        "pipeline": {"schedule": "1f1b", "chunks": 1},
        "precision": {"dtype": layout.dtype, "kernels": "reference"},
        "optimizer": {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": CLIP},
        "batch": {"global_": batch, "micro": layout.micro},
    }


def train(layout: Layout, grid: Grid, device: torch.device) -> Results:
    """Train one rank's part of `STEPS` steps; the host is apart from the device, also where both are the CPU."""
    host = Host(device, grid.comm.ledger, apart=True)
    built = build(config_of(layout), grid, device, REFERENCE, host)
    feed_of = feeds_of(grid["tensor"], device, layout.sequence)
    micro_batches = GLOBAL_BATCH // (layout.micro * layout.data)

    def passes(step: int) -> None:
        batches = [_batch(step, m, grid["data"].rank, layout) for m in range(micro_batches)]
        built.pipeline.train(batches, lambda batch: feed_of(batch, step, True))

    return record(built, passes, STEPS, LR, CLIP)


def _batch(step: int, micro_batch: int, data_rank: int, layout: Layout) -> MicroBatch:
    """Return tokens and uneven valid targets of samples, each a function of its number."""
    indices = [index_of(data_rank, micro_batch, row, layout.data, layout.micro) for row in range(layout.micro)]
    samples = [sample_id(step, index, GLOBAL_BATCH) for index in indices]
    windows, valids = [], []
    for sample in samples:
        generator = torch.Generator().manual_seed(sample)
        windows.append(torch.randint(0, MODEL["vocab"], (MODEL["seq_len"] + 1,), generator=generator))
        valids.append(torch.rand(MODEL["seq_len"], generator=generator) < 0.25 * (1 + sample % 4))
    window, valid_SB = torch.stack(windows, dim=1), torch.stack(valids, dim=1)
    return MicroBatch(window[:-1].clone(), window[1:].clone(), valid_SB, None, None, torch.tensor(samples))


def _named(values: Any) -> Any:
    """Return dictionaries as objects with attributes."""
    if not isinstance(values, dict):
        return values
    return SimpleNamespace(**{name: _named(value) for name, value in values.items()})
