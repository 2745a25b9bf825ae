"""Build data parallelism and ZeRO stages 1, 2 and 3 from scratch, in plain torch; see docs/zero_from_scratch.md.

python examples/zero_from_scratch.py [--ranks 4] prints for each stage what a rank holds, what it sends, and how far its
weights are from those of one process. The stages and the formulas are those of Rajbhandari et al., arXiv 1910.02054.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

WIDTH, BLOCKS, SAMPLES, STEPS = 64, 4, 32, 5
LEARNING_RATE, BETA1, BETA2, DECAY = 1e-3, 0.9, 0.95, 0.1
EPS = 1e-5  # an error in a gradient moves a weight by at most LEARNING_RATE / EPS = 100 times the error
PRECISIONS = {"bf16": (torch.bfloat16, torch.float32), "fp64": (torch.float64, torch.float64)}
# fp64 rounds to 2^-53 = 1.1e-16 of a number. Gradients here are below 1/2, so the same sum in another order differs by
# less than 1e-15. Adam makes at most 1e-13 of that in a step (EPS); in five steps that is less than 1e-12.
TOLERANCE = 1e-12


def layers() -> list[nn.Module]:
    """Return the model, on the meta device: shapes without memory."""
    norm, gelu = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.GELU()
    with torch.device("meta"):
        pairs = [(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)) for _ in range(BLOCKS)]
        return [*(nn.Sequential(norm, up, gelu, down) for up, down in pairs), nn.Linear(WIDTH, WIDTH, bias=False)]


def size_of(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return all samples of a step, as a function of its number only."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.roll(1, dims=1).sin()


class Unit:
    """Hold one layer's flat tensors on a rank between steps: whole, or this rank's slice."""

    def __init__(self, module: nn.Module, parameters: Tensor, gradients: Tensor, master: Tensor):
        self.module, self.parameters, self.gradients, self.master = module, parameters, gradients, master
        self.first, self.second = torch.zeros_like(master), torch.zeros_like(master)

    def compute(self, weights: Tensor, x: Tensor) -> Tensor:
        """Compute the layer; its parameters are views of one flat tensor."""
        shapes = {name: parameter.shape for name, parameter in self.module.named_parameters()}
        parts = weights.split([shape.numel() for shape in shapes.values()])
        views = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return torch.func.functional_call(self.module, views, (x,))


def adamw(unit: Unit, gradient: Tensor, step: int) -> None:
    """Update the master weights that this rank holds: AdamW is elementwise, so a slice is enough."""
    gradient = gradient.to(unit.master.dtype)
    unit.first.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
    unit.second.mul_(BETA2).add_(gradient * gradient, alpha=1 - BETA2)
    mean, square = unit.first / (1 - BETA1**step), unit.second / (1 - BETA2**step)
    unit.master.mul_(1 - LEARNING_RATE * DECAY)
    unit.master.sub_(mean / (square.sqrt() + EPS), alpha=LEARNING_RATE)


class Ranks:
    """Run collectives, and count the elements that this rank would send with ring algorithms."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.sent = rank, size, Counter[str]()

    def mine(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.size)[self.rank]

    def all_reduce(self, whole: Tensor, purpose: str, rounds: int = 2) -> None:
        """Sum a tensor over all ranks: one round of the ring adds, a second one distributes the sums."""
        self.sent[purpose] += rounds * whole.numel() * (self.size - 1) // self.size
        if self.size > 1:
            dist.all_reduce(whole)

    def reduce_scatter(self, whole: Tensor, purpose: str) -> Tensor:
        """Return this rank's slice of the sum, in the memory of `whole`: one round of the ring."""
        # Some versions of torch lack gloo's reduce-scatter for some dtypes, so this sums everything and uses one slice,
        # but counts the elements of a reduce-scatter. All stages then add in the same order, and give equal bits.
        self.all_reduce(whole, purpose, rounds=1)
        return self.mine(whole)

    def all_gather(self, whole: Tensor, mine: Tensor, purpose: str) -> Tensor:
        """Fill `whole` with the slices of all ranks: one round of the ring."""
        self.sent[purpose] += whole.numel() * (self.size - 1) // self.size
        self.mine(whole).copy_(mine)  # also rounds to the dtype of `whole`
        if self.size > 1:
            dist.all_gather(list(whole.chunk(self.size)), self.mine(whole))
        return whole


class Stage0:
    """Train with data parallelism: every rank holds all state, and only the samples are divided."""

    number, formula, fixed, shared, sends = 0, "16", 16, 0, 2

    def __init__(self, ranks: Ranks, precision: str):
        self.ranks, self.steps = ranks, 0
        self.dtype, master_dtype = PRECISIONS[precision]  # of parameters and gradients, of the optimizer state
        self.units, generator = [], torch.Generator().manual_seed(1234)
        for module in layers():
            whole = torch.randn(size_of(module), generator=generator, dtype=torch.float64) / WIDTH**0.5
            self.units.append(self.hold(module, whole.to(master_dtype)))

    def hold(self, module: nn.Module, whole: Tensor) -> Unit:
        parameters = whole.to(self.dtype, copy=True)
        return Unit(module, parameters, torch.zeros_like(parameters), whole)

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train on this rank's samples; return its part of the loss, the mean square error over the whole batch."""
        inputs = []
        with torch.no_grad():  # or autograd would keep the parameters until the backward
            for unit in self.units:
                inputs.append(x)
                x = unit.compute(self.weights(unit), x)
        error, count = x - y, y.numel() * self.ranks.size
        slope = error * (2 / count)
        for unit, x in zip(reversed(self.units), reversed(inputs), strict=True):
            slope = self.backward(unit, x, slope)
        self.steps += 1
        for unit in self.units:
            self.update(unit)
        return float(error.double().square().sum()) / count

    def backward(self, unit: Unit, x: Tensor, slope: Tensor) -> Tensor:
        weights, x = self.weights(unit).detach().requires_grad_(), x.detach().requires_grad_()
        gradient, slope = torch.autograd.grad(unit.compute(weights, x), [weights, x], slope)
        self.take(unit, gradient)
        return slope

    def weights(self, unit: Unit) -> Tensor:
        return unit.parameters

    def take(self, unit: Unit, gradient: Tensor) -> None:
        unit.gradients.copy_(gradient)

    def update(self, unit: Unit) -> None:
        self.ranks.all_reduce(unit.gradients, "gradients")
        adamw(unit, unit.gradients, self.steps)
        unit.parameters.copy_(unit.master)


class Stage1(Stage0):
    """Shard the optimizer state: section 5.1."""

    number, formula, fixed, shared, sends = 1, "4 + 12/N", 4, 12, 2

    def hold(self, module: nn.Module, whole: Tensor) -> Unit:
        parameters = whole.to(self.dtype)
        return Unit(module, parameters, torch.zeros_like(parameters), self.ranks.mine(whole).clone())

    def update(self, unit: Unit) -> None:
        gradient = self.ranks.reduce_scatter(unit.gradients, "gradients")
        adamw(unit, gradient, self.steps)
        self.ranks.all_gather(unit.parameters, unit.master, "parameters")


class Stage2(Stage1):
    """Shard the gradients too: section 5.2."""

    number, formula, fixed, shared, sends = 2, "2 + 14/N", 2, 14, 2

    def hold(self, module: nn.Module, whole: Tensor) -> Unit:
        parameters, master = whole.to(self.dtype), self.ranks.mine(whole).clone()
        return Unit(module, parameters, torch.zeros_like(master, dtype=self.dtype), master)

    def take(self, unit: Unit, gradient: Tensor) -> None:
        unit.gradients.copy_(self.ranks.reduce_scatter(gradient, "gradients"))

    def update(self, unit: Unit) -> None:
        adamw(unit, unit.gradients, self.steps)
        self.ranks.all_gather(unit.parameters, unit.master, "parameters")


class Stage3(Stage2):
    """Shard the parameters too: section 5.3."""

    number, formula, fixed, shared, sends = 3, "16/N", 0, 16, 3

    def hold(self, module: nn.Module, whole: Tensor) -> Unit:
        master = self.ranks.mine(whole).clone()
        return Unit(module, master.to(self.dtype, copy=True), torch.zeros_like(master, dtype=self.dtype), master)

    def weights(self, unit: Unit) -> Tensor:
        whole = unit.parameters.new_empty(size_of(unit.module))
        return self.ranks.all_gather(whole, unit.parameters, "parameters")

    def update(self, unit: Unit) -> None:
        adamw(unit, unit.gradients, self.steps)
        unit.parameters.copy_(unit.master)


class Report(NamedTuple):
    """Hold one rank's figures of a stage: bytes held between steps, elements sent per step, weight differences."""

    held: dict[str, int]
    sent: dict[str, int]
    differences: dict[str, list[float]]


def train(stage: type[Stage0], ranks: Ranks, precision: str) -> Stage0:
    trainer = stage(ranks, precision)
    for step in range(STEPS):
        trainer.step(*(ranks.mine(whole).to(trainer.dtype) for whole in batch(step)))
    return trainer


def held_by(trainer: Stage0) -> dict[str, int]:
    """Return the bytes held between steps, by kind. A slice counts with the whole memory that it is a view of."""
    kinds = {"parameters": ["parameters"], "gradients": ["gradients"], "optimizer state": ["master", "first", "second"]}
    tensors = {kind: [getattr(unit, name) for unit in trainer.units for name in kinds[kind]] for kind in kinds}
    return {kind: sum(tensor.untyped_storage().nbytes() for tensor in tensors[kind]) for kind in kinds}


def difference(trainer: Stage0, other: Stage0) -> float:
    """Return the largest difference between this rank's master weights and those of a stage 0 trainer."""
    pairs = [(ours.master, theirs.master) for ours, theirs in zip(trainer.units, other.units, strict=True)]
    far = [a - (b if a.numel() == b.numel() else trainer.ranks.mine(b)) for a, b in pairs]
    return float(torch.cat(far).abs().max())


def measure(ranks: Ranks) -> list[Report]:
    """Train in every stage; compare with one process on the whole batch, with stage 0, and with the initial weights."""
    others = [
        {name: train(Stage0, Ranks(0, 1), name) for name in PRECISIONS},
        {name: train(Stage0, ranks, name) for name in PRECISIONS},
        {name: Stage0(Ranks(0, 1), name) for name in PRECISIONS},
    ]
    reports = []
    for stage in (Stage0, Stage1, Stage2, Stage3):
        ranks.sent.clear()
        trained = {name: train(stage, ranks, name) for name in PRECISIONS}
        sent = {purpose: elements // STEPS // len(trained) for purpose, elements in ranks.sent.items()}
        far = {name: [difference(trained[name], other[name]) for other in others] for name in PRECISIONS}
        reports.append(Report(held_by(trained["bf16"]), sent, far))
    return reports


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(ranks, *arguments)` in `size` forked processes; return the results in rank order."""
    results = mp.get_context("fork").SimpleQueue()
    with TemporaryDirectory() as folder:
        call = (size, f"file://{folder}/meet", results, function, arguments)
        mp.start_processes(_be, call, nprocs=size, start_method="fork")  # type: ignore[attr-defined] - no __all__
    return [result for _, result in sorted((results.get() for _ in range(size)), key=lambda pair: pair[0])]


def _be(rank: int, size: int, meet: str, results: Any, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)  # the ranks share one machine's cores
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
    results.put((rank, function(Ranks(rank, size), *arguments)))
    dist.barrier()  # no rank leaves while others still communicate
    dist.destroy_process_group()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(cells) for cells in (head, *rows)]
    return "\n".join([f"| {lines[0]} |", "|" + "---|" * len(head), *(f"| {line} |" for line in lines[1:])])


def show(stage: type[Stage0], reports: Sequence[Report]) -> str:
    """Return the tables of a stage, made from the reports of all ranks."""
    (held, sent, _), size, parameters = reports[0], len(reports), size_of(*layers())
    assert all((report.held, report.sent) == (held, sent) for report in reports), "all ranks do alike"
    of_bytes = f"{stage.formula} = {stage.fixed + stage.shared / size:g}"
    of_elements = f"{stage.sends} (N-1)/N = {stage.sends * (size - 1) / size:g}"
    rows = []
    for what, counts, formula in (("bytes held", held, of_bytes), ("elements sent in a step", sent, of_elements)):
        total = sum(counts.values())
        cells = [f"{count:,}" for count in (*(counts.get(kind, 0) for kind in held), total)]
        rows.append([what, *cells, f"{total / parameters:g}", formula])
    first = table([f"each of {size} ranks", *held, "in all", "per parameter", "paper"], rows)
    far = {name: zip(*(report.differences[name] for report in reports), strict=True) for name in PRECISIONS}
    rows = [[name, *(f"{max(numbers):.2g}" for numbers in of_ranks)] for name, of_ranks in far.items()]
    head = [f"from one process (fp64: at most {TOLERANCE:g})", "from stage 0", "from the first weights"]
    second = table([f"weights after {STEPS} steps, largest difference", *head], rows)
    return f"Stage {stage.number}\n\n{first}\n\n{second}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Build ZeRO's stages from scratch.")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=4)  # these divide every layer: no padding
    size = parser.parse_args(arguments).ranks
    print(f"Psi = {size_of(*layers()):,} parameters in {len(layers())} layers, N = {size} ranks", flush=True)
    for stage, *reports in zip((Stage0, Stage1, Stage2, Stage3), *run_ranks(size, measure), strict=True):
        print(f"\n{show(stage, reports)}")


if __name__ == "__main__":
    main()
