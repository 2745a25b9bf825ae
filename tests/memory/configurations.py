"""The paper's configurations C1 to C5: measured on ranks of a small model, predicted, and beside the paper's figures.

python -m tests.memory.configurations        prints the tables of docs/memory.md
"""

from collections.abc import Iterator

import torch

from megazero.builders.assemble import build
from megazero.builders.job import job_of
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.kernels.operations import REFERENCE
from megazero.observe.allocations import Allocations
from megazero.plan.job import Job
from megazero.plan.memory import memory
from scripts.bench.ours import feeder
from tests.ranks import run_ranks

NAMES = ("c1", "c2", "c3", "c4", "c5")
CPU = torch.device("cpu")
CATEGORIES = ("parameters", "gradients", "optimizer", "pool", "inputs", "host_inputs", "activations")
V100 = 32e9  # bytes
# arXiv 1910.02054v3, Figures 6 and 7 (read off, +-0.2 GB) and 8, appendix tables: 400 GPUs, 16 tensor ranks, sequences
# of 1,024: billions of parameters, blocks, hidden size, heads, micro-batch, and by configuration what the paper says.
FIGURE_7 = {
    "40B": ((50, 8192, 32, 16), {"c1": 29.7, "c2": 24.1, "c3": 25.5, "c4": 19.8, "c5": 19.8}),
    "100B": ((125, 8192, 64, 32), {"c4": 29.6, "c5": 26.5}),
}
FIGURE_6 = {
    "40B": ((50, 8192, 32, 16), "c1"),
    "60B": ((132, 6144, 64, 16), "c2"),
    "50B": ((62, 8192, 32, 16), "c3"),
    "140B": ((175, 8192, 64, 16), "c4"),
    "150B": ((187, 8192, 64, 16), "c5"),
}
LARGEST = ("170B", (212, 8192, 64, 12))


def small(name: str, tensor: int, layers: int = 8) -> Config:
    """A model that eight ranks hold, in 16 bits."""
    sizes = (f"layers={layers}", "hidden=256", "heads=8", "vocab=1024", "seq_len=128", "dropout=0.1")
    options = [f"model.{size}" for size in sizes] + [f"parallel.tensor={tensor}", "precision.dtype=bf16"]
    return load("gpt100b", [f"{name}.yaml", *options, "batch.global=16", "batch.micro=4"])


def held(grid: Grid, config: Config) -> dict[str, int]:
    """Bytes by category in the second step."""
    ledger = grid.comm.ledger
    built = build(config, grid, CPU, REFERENCE, Host(CPU, ledger, apart=True))
    feed = feeder(config, grid)
    micro_batches = config.batch.global_ // (config.batch.micro * grid["data"].size)
    for step in range(2):
        built.engine.begin_step()
        with Allocations() as counted:
            built.pipeline.train([feed(step) for _ in range(micro_batches)], lambda batch: batch)
        built.engine.finish_step(1e-4)
    return {category: size.peak for category, size in ledger.bytes.items()} | {"activations": counted.peak}


def measured() -> Iterator[str]:
    """MB on a rank, measured and by formula."""
    yield "| tensor x data | | " + " | ".join(CATEGORIES) + " | on the device | by formula |"
    yield "|---" * (len(CATEGORIES) + 4) + "|"
    for tensor in (2, 4):
        for name in NAMES:
            config = small(name, tensor)
            found = run_ranks(2 * tensor, held, config, tensor=tensor)[0]
            predicted = memory(job_of(config, 2 * tensor), 0, fused=False)
            cells = [f"{found.get(category, 0) / 1e6:.2f}" for category in CATEGORIES]
            device = sum(found.get(category, 0) for category in CATEGORIES if not category.startswith("host_"))
            last = f"{device / 1e6:.2f} | {predicted.peak / 1e6:.2f}"
            yield f"| {tensor} x 2 | {name.upper()} | {' | '.join(cells)} | {last} |"


def of_paper(name: str, sizes: tuple[int, int, int, int]) -> Job:
    """400 GPUs, 16 tensor ranks, in fp16."""
    layers, hidden, heads, micro = sizes
    config = load("gpt170b", [f"{name}.yaml"])
    model = config.model.model_copy(update={"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden})
    model = model.model_copy(update={"kv_heads": heads, "dropout": 0.1})
    batch = config.batch.model_copy(update={"micro": micro, "global_": micro * 25})
    return job_of(config.model_copy(update={"model": model, "batch": batch}), 400)


def published() -> Iterator[str]:
    """GB on a GPU: by formula beside what the paper measured; for its largest models, and for one step more."""
    yield "| figure | model | | states | inputs | other | total | the paper |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, (sizes, rows) in FIGURE_7.items():
        for name, cached in rows.items():
            yield _row("7", model, name, sizes, f"{cached} GB cached at most")
    for model, (sizes, name) in FIGURE_6.items():
        yield _row("6", model, name, sizes, "the largest that fits")
    model, sizes = LARGEST
    for name in NAMES:
        yield _row("8", model, name, sizes, "trains" if name == "c5" else "out of memory")


def _row(figure: str, model: str, name: str, sizes: tuple[int, int, int, int], said: str) -> str:
    found = memory(of_paper(name, sizes), 0, fused=False)  # its system had no fused dropout
    states = sum(found.held.get(category, 0) for category in ("parameters", "gradients", "optimizer"))
    inputs = found.held.get("inputs", 0)
    cells = [f"{size / 1e9:.1f}" for size in (states, inputs, found.peak - states - inputs, found.peak)]
    return f"| {figure} | {model} | {name.upper()} | {' | '.join(cells)} | {said} |"


TABLES = (measured, published)

if __name__ == "__main__":
    print("\n\n".join("\n".join(table()) for table in TABLES))
