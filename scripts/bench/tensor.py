"""Training speed of tensor parallelism over two ranks beside torch DTensor.

    python scripts/bench/tensor.py [--model small wide] [--pairs 15] [--json]

    small   8 layers, hidden 512, 8 heads, vocabulary 8,192 untied, sequence 256, micro-batch 4     33.7M parameters
    wide    9 layers, hidden 1,024, 16 heads, the same vocabulary and sequence, micro-batch 2      130.4M

Every process has one thread, so two ranks have twice the cores of one process. The reference is our engine in one
process, and ratios are to half its time: 1.00 is a perfect division of the work, 2.00 the reference itself.

fp32, no dropout, AdamW, clip 1.0, gloo over the loopback. All start from the same weights and see the same tokens, and
the largest difference between the reference's losses and theirs over all steps is printed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from megazero.build import build_model, build_units, model_losses
from megazero.config import Batch, Config, Model, Parallel, resolved
from megazero.data.loader import MicroBatch
from megazero.kernels.choice import choose
from megazero.model.parameter import named_declarations
from megazero.parallel.board import Board
from megazero.parallel.grid import Grid, make_grid, single
from megazero.parallel.launch import Place, World, stay_on
from megazero.parallel.rendezvous import connect
from megazero.zero.engine import Engine, Spread
from megazero.zero.optimizer import AdamW
from scripts.bench.dtensor_gpt import UntiedGPT, complete_and_clip, make_optimizers, spread
from scripts.bench.harness import Comparison, System, compare, present
from scripts.bench.single import BETAS, CLIP, DECAY, EPS, LR, SEQ_LEN, VOCAB, random_batches

SIZES = {"small": (8, 512, 8, 4), "wide": (9, 1024, 16, 2)}  # layers, hidden, heads, micro-batch
RANKS = 2
CPU = torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, nargs="+", default=["small"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    present(measured(options.model, options.pairs), options.json)
    return 0


def measured(models: list[str], pairs: int) -> Iterator[tuple[str, float, Comparison]]:
    """(title, seconds that are 1.000, comparison) of each model."""
    for model in models:
        reference, *systems = systems_of(model)
        comparison = compare(reference, systems, pairs, divide_by=RANKS)
        floor_s = comparison.rows[0].seconds / RANKS
        yield f"{model}, 1.000 = {floor_s:.3f} s", floor_s, comparison


def systems_of(model: str) -> list[System]:
    """All systems, the reference first."""
    systems = [
        System(f"ours, one process, {model}", our_step, (model,), 1),
        System(f"plain torch, one process, {model}", plain_step, (model,), 1),
    ]
    for name, build in (("ours", our_rank), ("dtensor", dtensor_rank)):
        for suffix, sequence in (("", False), ("-sequence", True)):
            systems.append(System(f"{name}-tp{RANKS}{suffix}, {model}", build, (model, sequence), 1, RANKS))
    return systems


def config_of(model: str, tensor: int = 1, sequence: bool = False) -> Config:
    layers, hidden, heads, micro = SIZES[model]
    shape = Model(layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq_len=SEQ_LEN, tie_embeddings=False)
    batch = Batch(**{"global": micro, "micro": micro})
    return resolved(Config(model=shape, batch=batch, parallel=Parallel(tensor=tensor, sequence=sequence)))


def our_step(model: str) -> Callable[[], float]:
    """One training step of the engine in one process; returns the step's loss."""
    return engine_step(config_of(model), single())


def our_rank(model: str, sequence: bool, rank: int, size: int, store: str) -> Callable[[], float]:
    """The same step on one of `size` ranks."""
    place = Place(World(rank, size, rank, "local"), Board.private().seat(0), Path(store))
    wire = connect(place, timeout=timedelta(seconds=120), fingerprint="")
    grid = make_grid(tensor=size, pipeline=1, wire=wire, device_type="cpu")
    return engine_step(config_of(model, size, sequence), grid)


def engine_step(config: Config, grid: Grid) -> Callable[[], float]:
    ops = choose("auto", CPU, torch.float32)
    transformer = build_model(config, ops, grid.tensor)
    units = build_units(transformer, seed=config.run.seed, dtype=torch.float32, device=CPU)
    optimizer = AdamW(units, betas=BETAS, eps=EPS, weight_decay=DECAY)
    sequence = config.parallel.sequence
    among = Spread(grid.data, grid.tensor, sequence)
    tokens_per_step = config.batch.global_ * SEQ_LEN
    engine = Engine(units, optimizer, clip=CLIP, tokens_per_step=tokens_per_step, spread=among, ops=ops)
    losses = model_losses(transformer, CPU, sequence)
    batches = random_batches(config.batch.micro)
    step_number = iter(range(1 << 30))

    def step() -> float:
        tokens_SB, targets_SB = next(batches)
        valid_SB = torch.ones_like(tokens_SB, dtype=torch.bool)
        batch = MicroBatch(tokens_SB, targets_SB, valid_SB, None, None, torch.arange(tokens_SB.shape[1]))
        engine.begin_step()
        engine.backward(losses(batch, next(step_number), True), valid_SB)
        return engine.finish_step(LR).loss.item()

    return step


def plain_step(model: str) -> Callable[[], float]:
    """One training step of plain torch in one process."""
    config = config_of(model)
    plain = peer(config)
    (optimizer,) = make_optimizers(plain, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    batches = random_batches(config.batch.micro)

    def step() -> float:
        loss = plain(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def dtensor_rank(model: str, sequence: bool, rank: int, size: int, store: str) -> Callable[[], float]:
    """One training step of the same model spread with DTensor, on one of `size` ranks."""
    meet(rank, size, store)
    config = config_of(model)
    spread_out = peer(config)
    spread(spread_out, init_device_mesh("cpu", (size,)), sequence)
    optimizers = make_optimizers(spread_out, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    batches = random_batches(config.batch.micro)

    def step() -> float:
        with loss_parallel():
            loss = spread_out(*next(batches))
            loss.backward()
        complete_and_clip(spread_out, CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.full_tensor().item()

    return step


def meet(rank: int, size: int, store: str) -> None:
    """Joins the other ranks."""
    stay_on("lo")
    dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size)


def peer(config: Config) -> UntiedGPT:
    """The peers' model, whole, with the weights that ours starts from."""
    m = config.model
    model = UntiedGPT(m.layers, m.hidden, m.heads, m.vocab, m.seq_len)
    model.take_weights(initial_weights(config))
    return model


def initial_weights(config: Config) -> Callable[[str], Tensor]:
    """The whole initial weights by name, each made when asked for: they are no part of anybody's peak."""
    declarations = dict(named_declarations(build_model(config)))

    def weight(name: str) -> Tensor:
        declared = declarations[name]
        values = declared.initial(config.run.seed, name, 0, declared.local_numel)
        return values.to(torch.float32).view(declared.shape)

    return weight


if __name__ == "__main__":
    sys.exit(main())
