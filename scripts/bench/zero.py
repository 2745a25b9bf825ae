"""Training speed and memory of ZeRO's stages over two ranks beside DDP, ZeroRedundancyOptimizer, FSDP and DeepSpeed.

    python scripts/bench/zero.py [--model small wide] [--accumulation 1] [--pairs 15] [--json]
    python scripts/bench/zero.py --only ours-stage --before TREE     each stage beside itself in another checkout

    small   8 layers, hidden 512, 8 heads, vocabulary 8,192 tied, sequence 256, micro-batch 2      29.5M parameters
    wide    9 layers, hidden 1,024, 16 heads, the same vocabulary and sequence, micro-batch 1     122.0M

Two ranks of one thread each, gloo over the loopback, fp32, no dropout, AdamW fused, clip 1.0. The reference (ratio
1.000) is two ranks of plain torch that do the same work and exchange nothing; "ours, no exchange" is the same for our
engine, with fused and with reference kernels, so that what a stage costs can be told from how fast the model is.
Systems run in groups, because not all fit into memory together; each group has its own reference, and ratios are of
paired rounds within the group.

All systems that exchange start from the same weights and see the same tokens; the largest difference between their
losses over all steps is printed.

    python scripts/bench/zero.py --gpu [--json]

The engine alone on one GPU, world 1: a GPT of 1.3B parameters (24 layers, hidden 2,048, sequence 2,048) in bf16 with
fp32 masters, micro-batch 4: tokens/s, MFU, peak bytes.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch

from megazero.build.pipeline import model_shape
from megazero.comm.grid import single
from megazero.config.schema import Batch, Config, Model, Precision, Zero, resolved
from megazero.kernels.select import choose
from megazero.plan.hardware import peak_flops
from scripts.bench import data_parallel as peers
from scripts.bench.harness import WARM_UP, Comparison, Measured, System, compare, present, versions
from scripts.bench.other_tree import checkout, with_before, with_ratios
from scripts.bench.ours import CPU, SEQ_LEN, VOCAB, engine_step, grid_of

Stage = Literal[0, 1, 2, 3]
SIZES = {"small": (8, 512, 8, 2), "wide": (9, 1024, 16, 1)}  # layers, hidden, heads, micro-batch of a rank
RANKS = 2
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
TOGETHER = {"small": 6, "wide": 3}  # systems that run beside one reference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, nargs="+", default=["small"])
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[""], help="systems whose name begins so")
    parser.add_argument("--before", type=checkout, metavar="TREE", help="a checkout: each of ours beside its own there")
    parser.add_argument("--gpu", action="store_true", help="the engine alone, 1.3B parameters in bf16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.gpu:
        if not torch.cuda.is_available():
            parser.error("--gpu: torch sees no GPU")
        found = on_gpu()
        print(json.dumps(found, indent=1) if options.json else "\n".join(f"{k:<18} {v}" for k, v in found.items()))
        return 0
    only = tuple(options.only)
    present(measured(options.model, options.accumulation, options.pairs, only, options.before), options.json)
    return 0


def measured(
    models: list[str], accumulation: int, pairs: int, only: tuple[str, ...], before: str | None
) -> Iterator[tuple[str, float, Comparison]]:
    """Yield (title, seconds that are 1.000, comparison) of each group of systems of each model."""
    for model in models:
        config = config_of(model, 1, accumulation)
        floor = System("floor", peers.floor_rank, (config,), 1, RANKS, exchanges=False)
        systems = [system for system in systems_of(model, accumulation) if system.name.startswith(only)]
        present_ones = [system for system in systems if missing(system.name) is None]
        present_ones = with_before(present_ones, before, "zero", (model, accumulation))
        together = TOGETHER[model] if before is None else TOGETHER[model] // 2 * 2  # pairs stay together
        for start in range(0, len(present_ones), together):
            comparison = with_ratios(compare(floor, present_ones[start : start + together], pairs))
            floor_s = comparison.reference_s
            yield f"{model}, accumulation {accumulation}, 1.000 = {floor_s:.3f} s", floor_s, comparison
        absent = [Measured.absent(s.name, reason) for s in systems if (reason := missing(s.name)) is not None]
        if absent:
            yield f"{model}, not installed", float("nan"), Comparison(absent, {}, 0, 0)


def missing(name: str) -> str | None:
    """Return why a system cannot run here; None if it can."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "not installed: make setup EXTRAS=bench"
    return None


def systems_of(model: str, accumulation: int) -> list[System]:
    """Return all systems but the reference."""
    config = config_of(model, 1, accumulation)
    systems = [
        System("ours, no exchange", alone_rank, (config, "auto"), 1, RANKS, exchanges=False),
        System("ours, no exchange, reference kernels", alone_rank, (config, "reference"), 1, RANKS, exchanges=False),
    ]
    systems += [
        System(f"ours-stage{stage}", our_rank, (config_of(model, stage, accumulation),), 1, RANKS) for stage in STAGES
    ]
    rest: list[tuple[str, Callable, tuple]] = [
        ("ddp", peers.ddp_rank, ()),
        ("zero-redundancy-optimizer", peers.zero_redundancy_rank, ()),
        ("fsdp1-grad-op", peers.fsdp1_rank, ("SHARD_GRAD_OP",)),
        ("fsdp1-full-shard", peers.fsdp1_rank, ("FULL_SHARD",)),
        ("fsdp2-no-reshard", peers.fsdp2_rank, (False,)),
        ("fsdp2-reshard", peers.fsdp2_rank, (True,)),
        *((f"deepspeed-stage{stage}", peers.deepspeed_rank, (stage,)) for stage in (1, 2, 3)),
    ]
    return systems + [System(name, build, (config, *extra), 1, RANKS) for name, build, extra in rest]


def config_of(model: str, stage: Stage, accumulation: int) -> Config:
    layers, hidden, heads, micro = SIZES[model]
    shape = Model(layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq_len=SEQ_LEN)
    batch = Batch(**{"global": micro * RANKS * accumulation, "micro": micro})
    return resolved(Config(model=shape, batch=batch, zero=Zero(stage=stage)))


def our_rank(config: Config, rank: int, size: int, store: str) -> Callable[[], float]:
    return engine_step(config, grid_of(rank, size, store), choose("auto", CPU, torch.float32))


def alone_rank(config: Config, kernels: str, rank: int, size: int, store: str) -> Callable[[], float]:
    """Return the same work on one rank, without any other."""
    own = config.batch.model_copy(update={"global_": config.batch.global_ // size})
    return engine_step(config.model_copy(update={"batch": own}), single(), choose(kernels, CPU, torch.float32))


def on_gpu() -> dict[str, object]:
    """Return speed and memory of the engine on this machine's first GPU."""
    device = torch.device("cuda", 0)
    shape = Model(layers=24, hidden=2048, heads=16, vocab=50304, seq_len=2048)
    batch = Batch(**{"global": 4, "micro": 4})
    config = resolved(Config(model=shape, batch=batch, precision=Precision(dtype="bf16")))
    step = engine_step(config, single(), choose("auto", device, torch.bfloat16), device)
    for _ in range(WARM_UP):
        step()
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        step()  # reads its loss: the device has finished
        seconds.append(time.perf_counter() - began)
    rate = config.batch.global_ * shape.seq_len / statistics.median(seconds)
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name, "bf16")
    return {
        "machine": name,
        "versions": versions(),
        "step_s": statistics.median(seconds),
        "tokens_per_second": rate,
        "mfu": None if peak is None else rate * model_shape(config).flops_per_token() / peak,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


if __name__ == "__main__":
    sys.exit(main())
