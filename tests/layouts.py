"""The same few steps on any grid, and the logical tensors put together from all ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.build import build_engine
from megazero.config import Optimizer
from megazero.data.sampler import index_of
from megazero.kernels.operations import REFERENCE
from megazero.model.parameter import declaration_of
from megazero.model.step import Step
from megazero.model.transformer import Shape, Transformer
from megazero.parallel.collectives import all_gather
from megazero.parallel.grid import Grid
from megazero.parallel.wire import BUCKET
from megazero.zero.engine import Engine, StepResult
from megazero.zero.placement import STAGES, Precision, Spread
from tests.model.small import GPT, LLAMA
from tests.ranks import run_ranks

SHAPES = {
    "gpt": replace(GPT, dropout=0.1),
    "llama": replace(LLAMA, heads=8, kv_heads=4, dropout=0.1),
    "gpt-untied-rotary": replace(GPT, tie_embeddings=False, position="rotary", norm="rmsnorm", dropout=0.1),
}
GLOBAL_BATCH, STEPS = 16, 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """How a run is laid out: sizes of the axes, sequence parallelism, micro-batches per step and data rank, stage.

    Attributes:
        bucket: bytes of a communication that may be under way.
        sockets: ranks talk through sockets, as if on different hosts.
    """

    tensor: int = 1
    data: int = 1
    sequence: bool = False
    accumulation: int = 1
    stage: int = 0
    bucket: int = BUCKET
    sockets: bool = False


@dataclass
class Trained:
    """What a run computed: per step loss and norm, and by name initial weights, first gradients, final weights."""

    losses: list[float]
    norms: list[float]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(layout: Layout, flavour: str, precision: Precision, rank: Callable[..., Trained] | None = None) -> Trained:
    """`STEPS` steps in a layout; whole tensors, checked to be equal where several ranks hold the same.

    Args:
        rank: does one rank's part, instead of `train_rank`.
    """
    size = layout.tensor * layout.data
    ranks = run_ranks(size, rank or train_rank, layout, SHAPES[flavour], precision, tensor=layout.tensor)
    for other in ranks[1:]:
        assert other.losses == ranks[0].losses and other.norms == ranks[0].norms, "replicas differ"
    first = ranks[0]
    return Trained(
        first.losses,
        first.norms,
        *(
            whole([getattr(rank, part) for rank in ranks], SHAPES[flavour], layout.tensor)
            for part in ("initial", "gradients", "weights")
        ),
    )


def engine_of(model: Transformer, spread: Spread, shape: Shape, precision: Precision) -> Engine:
    return build_engine(
        model,
        seed=0,
        spread=spread,
        precision=precision,
        device=CPU,
        optimizer=Optimizer(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=0.5),
        tokens_per_step=GLOBAL_BATCH * shape.seq_len,
        ops=REFERENCE,
    )


class Rank:
    """One rank of a layout, with its model and engine."""

    def __init__(self, grid: Grid, layout: Layout, shape: Shape, precision: Precision):
        wire = replace(grid.data.wire, bucket=layout.bucket)
        wire = replace(wire, mail=None) if layout.sockets else wire
        self.data, self.tensor = replace(grid.data, wire=wire), replace(grid.tensor, wire=wire)
        self.layout, self.shape = layout, shape
        self.model = Transformer(shape, seed=0, tensor=self.tensor, sequence=layout.sequence, ops=REFERENCE)
        spread = Spread(self.data, self.tensor, layout.sequence, STAGES[layout.stage])
        self.engine = engine_of(self.model, spread, shape, precision)
        self.micro = GLOBAL_BATCH // (layout.data * layout.accumulation)

    def losses(self, step: int, m: int) -> tuple[Tensor, Tensor]:
        """Token losses of a micro-batch, and which of them count."""
        data, shape = self.data, self.shape
        rows = [index_of(data.rank, m, row, data.size, self.micro) for row in range(self.micro)]
        tokens_SB, targets_SB, valid_SB, now = samples([step * GLOBAL_BATCH + row for row in rows], step, shape)
        offset = self.tensor.rank * shape.seq_len // self.tensor.size if self.layout.sequence else 0
        return self.model.losses(tokens_SB, targets_SB, valid_SB, replace(now, sequence_offset=offset)), valid_SB

    def step(self, step: int) -> StepResult:
        self.engine.begin_step(self.layout.accumulation)
        for m in range(self.layout.accumulation):
            self.engine.forward(m)
            self.engine.backward(*self.losses(step, m), m)
        return self.engine.finish_step(lr=1e-3)

    def weights(self) -> dict[str, Tensor]:
        return {n: v.clone() for n, v in self.engine.named_parameters()}


def train_rank(grid: Grid, layout: Layout, shape: Shape, precision: Precision) -> Trained:
    """One rank's part."""
    return record(Rank(grid, layout, shape, precision), Rank.step)


def record(rank: Rank, one_step: Callable[[Rank, int], StepResult]) -> Trained:
    """Runs the steps and notes what they computed."""
    result = Trained([], [], rank.weights(), {}, {})
    for step in range(STEPS):
        done = one_step(rank, step)
        result.losses.append(done.loss.item())
        result.norms.append(done.grad_norm.item())
        if step == 0:
            result.gradients = reduced_gradients(rank.engine)
    result.weights = rank.weights()
    return result


def reduced_gradients(engine: Engine) -> dict[str, Tensor]:
    """This tensor rank's part of the reduced gradients, from wherever they rest."""
    found = {}
    for unit in engine.units:
        own, data = unit.own_gradients, engine.spread.data
        flat = own if len(own) == unit.numel else all_gather(own.contiguous(), data, "test")
        for interval in unit.layout.intervals:
            found[interval.name] = flat[interval.start : interval.stop].view(interval.shape).clone()
    return found


def samples(ids: list[int], step: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Step]:
    """Tokens, targets and uneven valid tokens of samples, each a function of its id; two documents in each."""
    windows, valids, cuts = [], [], []
    for sample in ids:
        generator = torch.Generator().manual_seed(sample)
        windows.append(torch.randint(0, shape.vocab, (shape.seq_len + 1,), generator=generator))
        valids.append(torch.rand(shape.seq_len, generator=generator) < sample % 5 / 4)  # none to all
        cuts.append(int(torch.randint(1, shape.seq_len, (), generator=generator)))
    window = torch.stack(windows, dim=1)
    positions = torch.arange(shape.seq_len)[:, None].expand(-1, len(ids))
    documents_SB = (positions >= torch.tensor(cuts)).long()
    positions_SB = positions - documents_SB * torch.tensor(cuts)
    now = Step(step, torch.tensor(ids)).within_documents(positions_SB, documents_SB)
    return window[:-1].clone(), window[1:].clone(), torch.stack(valids, dim=1), now


def whole(parts: list[dict[str, Tensor]], shape: Shape, tensor: int) -> dict[str, Tensor]:
    """Logical tensors from those of all ranks (tensor axis fastest), without padding.

    What several ranks hold alike must be alike bit for bit.
    """
    model = Transformer(shape, seed=0, tensor=_anybody(tensor), sequence=False, ops=REFERENCE)
    declarations = {name: declaration_of(parameter) for name, parameter in model.named_parameters()}
    result = {}
    for name, declaration in declarations.items():
        for rank, replica in enumerate(parts):
            assert_same(name, replica[name], parts[rank % tensor][name])
        if declaration.split:
            result[name] = torch.cat([part[name] for part in parts[:tensor]])
            padding = result[name][declaration.shape[0] :]
            assert not padding.any(), f"{name}: padding is no longer zero"
            result[name] = result[name][: declaration.shape[0]]
        else:
            result[name] = parts[0][name]
            for part in parts[1:tensor]:
                assert_same(name, part[name], result[name])
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
    missing = set().union(*(_pairs(case) for case in cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: tuple) -> set[tuple]:
    return {(i, case[i], j, case[j]) for i in range(len(case)) for j in range(i)}


def _anybody(size: int):
    from megazero.parallel.grid import Axis

    return Axis("tensor", size)


def ids(cases: Iterable[tuple]) -> list[str]:
    return ["-".join(str(value) for value in case) for case in cases]
