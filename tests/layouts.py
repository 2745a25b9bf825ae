"""The same few steps on any grid, and the logical tensors put together from all ranks."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.builders.assemble import DTYPES, StageInputs, build
from megazero.builders.job import job_of, laid_out
from megazero.comm.context import BUCKET
from megazero.comm.grid import Grid
from megazero.comm.home import PagedHome
from megazero.comm.host import Host
from megazero.config.model import Model
from megazero.config.schema import Config, resolved
from megazero.data.sampler import index_of
from megazero.kernels.operations import REFERENCE
from megazero.model.batch_context import BatchContext
from megazero.model.parameter import declarations_by_name
from megazero.model.transformer import Transformer
from megazero.pipeline.stage import Stage
from megazero.plan.job import Bytes, Job
from megazero.plan.model import Rope, Shape
from megazero.tools.certify.rank import reduced_gradients, whole_gradients
from megazero.zero.engine import StepResult
from megazero.zero.placement import Precision
from tests.model.small import GPT, LLAMA
from tests.ranks import run_ranks

SHAPES = {
    "gpt": replace(GPT, dropout=0.1),
    "llama": replace(LLAMA, heads=8, kv_heads=4, dropout=0.1),
    "gpt-untied-rotary": replace(
        GPT, tie_embeddings=False, position="rotary", norm="rmsnorm", qk_norm="head", dropout=0.1
    ),
}
SHAPES |= {
    "deep": replace(GPT, layers=4, dropout=0.1),
    "deep-untied": replace(LLAMA, layers=4, heads=8, kv_heads=4, qk_norm="head", dropout=0.1),
}
RECOMPUTED = {  # settings of recompute and Pa, by name
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "Pa": {"recompute": "full", "partition": True},
    "Pa+cpu": {"recompute": "full", "partition": True, "offload": "cpu"},
    "Pa+nvme": {"recompute": "full", "partition": True, "offload": "nvme"},
}
GLOBAL_BATCH = 16
STEPS, DELAYED_STEPS = 2, 3  # the second one sees what the first has updated; if that comes late, the third
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Wires:
    """How ranks talk, which is no part of a job.

    Attributes:
        bucket: bytes of a communication that may be under way.
        sockets: ranks talk through sockets, as if on different hosts.
    """

    bucket: int = BUCKET
    sockets: bool = False


def job_on(
    tensor: int = 1, data: int = 1, sequence: bool = False, accumulation: int = 1, stage: int = 0, **how: Any
) -> Job:
    """Return a job on some ranks, of no model yet: `config_of` gives it one.

    Args:
        accumulation: micro-batches per step and data rank.
        how: other fields of a `Job`.
    """
    micro = GLOBAL_BATCH // (data * accumulation)
    sizes = {"tensor": tensor, "data": data, "micro_batch": micro, "global_batch": GLOBAL_BATCH}
    return replace(_NO_MODEL, **sizes, sequence=sequence, stage=stage, **how)


def model_options(shape: Shape) -> dict[str, Any]:
    """Return the section `model` of a shape's config."""

    def given(value: Any, fields: Sequence[Field]) -> dict[str, Any]:
        return {each.name: each_ for each in fields if (each_ := getattr(value, each.name)) != each.default}

    rope = None if len(shape.kinds) > 1 or shape.kinds[0].window else shape.kinds[0].rope
    kinds = None
    if rope is None or rope != Rope(rope.theta):
        kinds = {
            f"kind{i}": {"window": kind.window, "rope": kind.rope and given(kind.rope, fields(kind.rope))}
            for i, kind in enumerate(shape.kinds)
        }
    own = {name: value for name, value in vars(shape).items() if name in Model.model_fields}
    places = shape.biases or frozenset()
    biases = {} if shape.biases is None else {place: place in places for place in ("qkv", "out", "mlp")}
    own |= {"norm_bias": None if shape.biases is None else "norm" in places}
    if shape.query_scale is not None:
        own["query_scale"] = dict(zip(("beta", "original"), shape.query_scale, strict=True))
    caps = {"attention": shape.attention_cap, "logits": shape.logit_cap}
    own |= {"rope_theta": 10000.0 if rope is None else rope.theta}
    return own | {"head_dim": shape.head_size, "bias": biases, "softcap": caps, "layer_kinds": kinds}


def config_of(job: Job, shape: Shape, precision: Precision) -> Config:
    """Return the config of a job of a model; its host is apart, as beside a GPU."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    options = {
        "model": model_options(shape),
        "zero": {
            "grad_dtype": "fp32" if precision.gradients == torch.float32 else "param",
            "reduce_dtype": None if precision.reduced is None else names[precision.reduced],
        },
        "precision": {"dtype": names[precision.parameters], "kernels": "reference"},
        "optimizer": {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 0.5},
        "batch": {"global": job.global_batch},
    }
    return laid_out(resolved(Config.model_validate(options)), job)


def planned(job: Job, shape: Shape, precision: Precision) -> Job:
    """Return the job of that config, as a run plans it."""
    return job_of(config_of(job, shape, precision), job.ranks)


_NO_MODEL = Job(Shape(0, 0, 0, 0, 0, 0, 0), Bytes(0, 0, 0))


@dataclass
class Trained:
    """What a run computed: per step loss and norm, and by name initial weights, first gradients, final weights."""

    losses: list[float]
    norms: list[float]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(job: Job, flavour: str, precision: Precision, rank: Callable[..., Trained] | None = None) -> Trained:
    """A few steps in a layout; whole tensors, checked to be equal where several ranks hold the same.

    Args:
        rank: does one rank's part, instead of `train_rank`.
    """
    shape = SHAPES[flavour]
    axes = {"tensor": job.tensor, "pipeline": job.pipeline, "shard": job.neighbours}
    ranks = run_ranks(job.ranks, rank or train_rank, job, shape, precision, **axes)
    for other in ranks[1:]:
        assert other.losses == ranks[0].losses and other.norms == ranks[0].norms, "replicas differ"
    first = ranks[0]
    return Trained(
        first.losses,
        first.norms,
        *(
            whole([getattr(rank, part) for rank in ranks], shape, job.tensor)
            for part in ("initial", "gradients", "weights")
        ),
    )


class Rank:
    """One rank of a layout, with its part of the model."""

    def __init__(self, grid: Grid, job: Job, shape: Shape, precision: Precision, wires: Wires | None = None):
        self.grid = rewired(grid, wires or Wires())
        self.data, self.tensor = self.grid["data"], self.grid["tensor"]
        self.job, self.shape = job, shape
        self.host = Host(CPU, grid.comm.ledger, apart=True)
        homes = {"nvme": disks_of(grid)} if job.uses_disks else {}
        self.built = built = build(config_of(job, shape, precision), self.grid, CPU, REFERENCE, self.host, homes=homes)
        self.model, self.engine, self.pipeline = built.model, built.engine, built.pipeline

    @property
    def last(self) -> Stage:
        """The stage that has the loss, if it is here."""
        return self.pipeline.stages[self.pipeline.num_stages - 1]

    def feed(self, step: int, m: int) -> StageInputs:
        """A micro-batch of a step."""
        data, shape, micro = self.data, self.shape, self.job.micro_batch
        rows = [index_of(data.rank, m, row, data.size, micro) for row in range(micro)]
        tokens_SB, targets_SB, valid_SB, now = samples([step * GLOBAL_BATCH + row for row in rows], step, shape)
        offset = self.tensor.rank * shape.seq_len // self.tensor.size if self.job.sequence else 0
        return StageInputs(tokens_SB, targets_SB, valid_SB, replace(now, sequence_offset=offset))

    def passes(self, step: int, **options: Any) -> None:
        feeds = [self.feed(step, m) for m in range(self.job.micro_batches)]
        self.pipeline.train(feeds, lambda feed: feed, **options)

    def step(self, step: int) -> StepResult:
        self.engine.begin_step()
        self.passes(step)
        return self.engine.finish_step(lr=1e-3)

    def weights(self) -> dict[str, Tensor]:
        return {n: v.clone() for n, v in self.engine.named_parameters()}


def disks_of(grid: Grid) -> PagedHome:
    """A folder as a disk; its windows are so short that all units have several."""
    from megazero.nvme.disk import Disk
    from megazero.nvme.disk_queue import DiskQueue

    return Disk([Path(tempfile.gettempdir())], grid.comm.ledger, 1 << 24, DiskQueue(depth=4), window=1 << 9)


def rewired(grid: Grid, wires: Wires) -> Grid:
    """The grid with a way to talk."""
    comm = replace(grid.comm, bucket=wires.bucket)
    return grid.with_comm(replace(comm, shared_memory=None) if wires.sockets else comm)


def train_rank(grid: Grid, job: Job, shape: Shape, precision: Precision, wires: Wires | None = None) -> Trained:
    """One rank's part."""
    return record(Rank(grid, job, shape, precision, wires), Rank.step)


def record(rank: Rank, one_step: Callable[[Rank, int], StepResult]) -> Trained:
    """Runs the steps and notes what they computed."""
    result = Trained([], [], rank.weights(), {}, {})
    for step in range(DELAYED_STEPS if rank.job.delayed else STEPS):
        with reduced_gradients(rank.engine) if step == 0 else nullcontext({}) as reduced:
            done = one_step(rank, step)
        result.losses.append(done.loss.item())
        result.norms.append(done.grad_norm.item())
        if step == 0:
            named = whole_gradients(reduced, done.applied)
            result.gradients = {name: value.clone() for name, value in named}
    result.weights = rank.weights()
    return result


def second_step(
    grid: Grid, job: Job, flavour: str, precision: Precision
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """The bytes sent by axis and purpose in the second step, and those held by category."""
    rank, ledger = Rank(grid, job, SHAPES[flavour], precision), grid.comm.ledger
    rank.step(0)
    before = {(axis, what): sent.bytes_sent for axis, of in ledger.traffic.items() for what, sent in of.items()}
    rank.step(1)
    sent: dict[str, dict[str, int]] = {}
    for axis, purposes in ledger.traffic.items():
        for what, now in purposes.items():
            if more := now.bytes_sent - before.get((axis, what), 0):
                sent.setdefault(axis, {})[what] = more
    return sent, {category: held.now for category, held in ledger.bytes.items()}


def samples(ids: list[int], step: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor, BatchContext]:
    """Tokens, targets and uneven valid tokens of samples, each a function of its id; two documents in each."""
    windows, valids, cuts = [], [], []
    for sample in ids:
        generator = torch.Generator().manual_seed(sample)
        windows.append(torch.randint(0, shape.vocab, (shape.seq_len + 1,), generator=generator))
        valids.append(torch.rand(shape.seq_len, generator=generator) < sample % 5 / 4)  # none to all
        cuts.append(int(torch.randint(1, shape.seq_len, (), generator=generator)))
    window = torch.stack(windows, dim=1)
    positions = torch.arange(shape.seq_len)[:, None].expand(-1, len(ids))
    positions_SB = torch.where(positions < torch.tensor(cuts), positions, positions - torch.tensor(cuts))
    lengths = tuple((cut, shape.seq_len - cut) for cut in cuts)
    now = BatchContext(step, torch.tensor(ids)).within_documents(positions_SB, lengths)
    return window[:-1].clone(), window[1:].clone(), torch.stack(valids, dim=1), now


def whole(parts: list[dict[str, Tensor]], shape: Shape, tensor: int) -> dict[str, Tensor]:
    """Logical tensors from those of all ranks (tensor axis fastest), without padding.

    What several ranks hold alike must be alike bit for bit.
    """
    model = Transformer(shape, seed=0, tensor=_anybody(tensor), sequence=False, ops=REFERENCE)
    declarations = declarations_by_name(model.named_parameters())
    result = {}
    for name, declaration in declarations.items():
        holders = [(rank % tensor, part[name]) for rank, part in enumerate(parts) if name in part]
        firsts = [next(value for place, value in holders if place == k) for k in range(tensor)]
        for place, value in holders:
            assert_same(name, value, firsts[place])
        if declaration.split:
            result[name] = torch.cat(firsts)
            padding = result[name][declaration.shape[0] :]
            assert not padding.any(), f"{name}: padding is no longer zero"
            result[name] = result[name][: declaration.shape[0]]
        else:
            result[name] = firsts[0]
            for value in firsts[1:]:
                assert_same(name, value, result[name])
    return result


def equal(one: Trained, other: Trained) -> None:
    """Bit for bit."""
    assert one.losses == other.losses and one.norms == other.norms
    for kind in ("initial", "gradients", "weights"):
        for name, value in getattr(one, kind).items():
            assert torch.equal(value, getattr(other, kind)[name]), f"{kind} of {name}"


def assert_same(name: str, a: Tensor, b: Tensor) -> None:
    assert torch.equal(a, b), f"{name}: replicas differ by {float((a - b).abs().max())}"


def pairwise(cases: list[tuple]) -> list[tuple]:
    """A few of the cases in which every two values that occur together somewhere occur together."""
    codes = []
    for column in zip(*cases, strict=True):
        known = {value: code for code, value in enumerate(dict.fromkeys(column))}
        codes.append(np.array([known[value] for value in column]))
    pairs = (a * len(cases) + b for i, a in enumerate(codes) for b in codes[:i])
    has = np.concatenate([pair[:, None] == np.unique(pair) for pair in pairs], axis=1)  # [cases, pairs of values]
    chosen, missing = [], np.ones(has.shape[1], bool)
    while missing.any():
        best = int(has[:, missing].sum(1).argmax())
        chosen.append(cases[best])
        missing &= ~has[best]
    return chosen


def _anybody(size: int):
    from megazero.comm.grid import Axis

    return Axis("tensor", size)


def ids(cases: Iterable[tuple]) -> list[str]:
    return ["-".join(str(value) for value in case) for case in cases]
