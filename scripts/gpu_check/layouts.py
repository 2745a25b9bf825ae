"""A tiny GPT in several layouts: their options, their tokens, and the training of one rank.

All code between the options and the results is that of a run of train.py.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megazero.builders.assemble import DTYPES, build, feeds_of
from megazero.builders.job import laid_out
from megazero.builders.pipeline import model_shape
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.config.schema import Config, resolved
from megazero.data.batch import MicroBatch
from megazero.data.sampler import index_of, sample_id
from megazero.kernels.select import choose, for_host
from megazero.launcher.environment import fix_cublas_workspace
from megazero.plan.job import Bytes, Job
from megazero.run.attention import take
from megazero.tools.certify.rank import Results, record

GLOBAL_BATCH, STEPS, CLIP = 8, 3, 0.5
LR = 1e-4  # where a gradient is near zero, rounding decides its sign, and so moves the weight by up to +-LR
HEADS = 4
MODEL = {
    "layers": 4,
    "hidden": 64,
    "heads": HEADS,
    "kv_heads": HEADS,
    "ffn": 256,
    "vocab": 251,  # odd, so that the last of two tensor ranks pads
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
class Case:
    """A way to train the model.

    Attributes:
        how: the fields of its `Job` that differ from those of one process in stage 0.
        kernels: as in precision.kernels.
        grad_dtype: as in zero.grad_dtype.
        options: further options of the config, by section.
    """

    name: str
    how: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    kernels: str = "reference"
    grad_dtype: str = "fp32"
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        """Return the planner's job of this case."""
        return replace(_ALONE, **self.how)

    @property
    def folder(self) -> str:
        """Return the name of the folder for its results."""
        return f"{self.name}, {self.dtype}, {self.kernels}"


def config_of(case: Case, model: dict[str, Any] = MODEL, batch: int = GLOBAL_BATCH) -> Config:
    """Return the validated config of a case.

    Args:
        batch: sequences per step.
    """
    options: dict[str, dict[str, Any]] = {
        "model": model,
        "precision": {"dtype": case.dtype, "kernels": case.kernels},
        "optimizer": {"clip": CLIP},
        "batch": {"global": batch, "micro": case.job.micro_batch},
        "data": {"mask_eod": case.job.mask_eod},
        "zero": {"grad_dtype": case.grad_dtype},
    }
    for section, own in case.options.items():
        options[section] = options[section] | own
    return laid_out(resolved(Config.model_validate(options)), case.job)


_ALONE = Job(
    model_shape(resolved(Config.model_validate({"model": MODEL}))),
    Bytes(4, 4, 4),
    stage=0,
    micro_batch=GLOBAL_BATCH,
    global_batch=GLOBAL_BATCH,
)


def train(case: Case, grid: Grid, device: torch.device) -> Results:
    """Train one rank for `STEPS` steps; the host counts as apart from the device even if both are the CPU."""
    host = Host(device, grid.comm.ledger, apart=True)
    ops = choose(case.kernels, device, DTYPES[case.dtype])
    host_ops = for_host(case.kernels, torch.float32)
    built = build(config_of(case), grid, device, ops, host, host_ops=host_ops)
    feed_of = feeds_of(grid["tensor"], device, case.job.sequence)

    def passes(step: int) -> None:
        batches = [_batch(step, m, grid["data"].rank, case.job) for m in range(case.job.micro_batches)]
        built.pipeline.train(batches, lambda batch: feed_of(batch, step, True))

    results = Results()
    record(results, built, passes, STEPS, LR, overflow=-1)
    return results


def exact(device: torch.device) -> None:
    """Make torch deterministic, with fp32 products in fp32; call this before the first product.

    No TF32, no sums in 16 bits, no atomics. Attention uses plain products: the backward of other implementations adds
    in an arbitrary order, and their fp32 sums may differ from a CPU's by more than `tolerances.py` allows.
    `attention.py` checks the attention that a run chooses; `waits.py`, `steps.py` and `train.py` train with it.
    """
    torch.set_num_threads(1)
    if device.type == "cuda":
        fix_cublas_workspace()
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        take("math")


def _batch(step: int, micro_batch: int, data_rank: int, job: Job) -> MicroBatch:
    """Return random tokens, with a different share of valid targets per sample; a function of the sample numbers."""
    indices = [index_of(data_rank, micro_batch, row, job.data, job.micro_batch) for row in range(job.micro_batch)]
    samples = [sample_id(step, index, GLOBAL_BATCH) for index in indices]
    windows, valids = [], []
    for sample in samples:
        generator = torch.Generator().manual_seed(sample)
        windows.append(torch.randint(0, MODEL["vocab"], (MODEL["seq_len"] + 1,), generator=generator))
        valids.append(torch.rand(MODEL["seq_len"], generator=generator) < 0.25 * (1 + sample % 4))
    window, valid_SB = torch.stack(windows, dim=1), torch.stack(valids, dim=1)
    return MicroBatch(window[:-1].clone(), window[1:].clone(), valid_SB, None, None, torch.tensor(samples))
