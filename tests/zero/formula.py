"""What a stage keeps on each rank, in closed form, and the tables of docs/zero.md made from it.

python -m tests.zero.formula        prints the tables
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megazero.plan.job import Job
from megazero.plan.links import split_by_node
from megazero.plan.memory import memory
from megazero.plan.model import Shape
from megazero.plan.states import Bytes, states, units
from megazero.plan.traffic import traffic

# Bytes per parameter of parameters, gradients and optimizer state: with 16-bit parameters K = 12 (fp32 masters and two
# moments), with fp32 ones 8 (they are their own masters). The ZeRO paper, section 3.1; docs/zero.md.
BYTES = {"fp32": (4, 4, 8), "bf16, gradients fp32": (2, 4, 12), "bf16, gradients bf16": (2, 2, 12)}
KINDS = ("parameters", "gradients", "optimizer")
SHARDED = {0: (), 1: ("optimizer",), 2: ("gradients", "optimizer"), 3: ("parameters", "gradients", "optimizer")}
RANKS = (1, 2, 4, 8)
PAPER = {"os": 1, "os+g": 2, "os+g+p": 3}  # its names of the stages
TABLE_1 = Path(__file__).parents[1] / "plan/published/zero_table_1.csv"


def per_parameter(stage: int, ranks: int, precision: str) -> dict[str, float]:
    """Bytes of each kind that rest on a rank, for each parameter of the model."""
    sizes = zip(KINDS, BYTES[precision], strict=True)
    return {kind: size / ranks if kind in SHARDED[stage] else float(size) for kind, size in sizes}


def table_1() -> Iterator[tuple[int, str, str, float, str]]:
    """Every cell of the paper's Table 1: ranks, model, stage in its words, our GB, and the cell as printed."""
    with TABLE_1.open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            ranks = int(row.pop("ranks"))
            for column, printed in row.items():
                model, stage = column.split(" ")
                parameters = float(model[:-1]) * {"B": 1e9, "T": 1e12}[model[-1]]
                each = sum(per_parameter(PAPER[stage], ranks, "bf16, gradients bf16").values())
                yield ranks, model, stage, parameters * each / 1e9, printed


def agrees(ours: float, printed: str) -> bool:
    """Equal as printed: rounded, or cut off, to the digits that the paper shows."""
    digits = len(printed.partition(".")[2])
    unit = 10**digits
    return float(printed) in (math.floor(ours * unit) / unit, math.floor(ours * unit + 0.5) / unit)


def resting() -> Iterator[str]:
    yield "| precision | stage | 1 rank | 2 | 4 | 8 | formula |"
    yield "|---|---|---|---|---|---|---|"
    for precision, sizes in BYTES.items():
        for stage in SHARDED:
            cells = [f"{sum(per_parameter(stage, ranks, precision).values()):g}" for ranks in RANKS]
            whole = sum(size for kind, size in zip(KINDS, sizes, strict=True) if kind not in SHARDED[stage])
            parts = sum(sizes) - whole
            formula = " + ".join(text for text in (f"{whole}" * (whole > 0), f"{parts}/N" * (parts > 0)) if text)
            yield f"| {precision} | {stage} | {' | '.join(cells)} | {formula} |"


def paper() -> Iterator[str]:
    yield "| ranks | model | os: ours | paper | os+g: ours | paper | os+g+p: ours | paper |"
    yield "|---|---|---|---|---|---|---|---|"
    cells = list(table_1())
    for i in range(0, len(cells), 3):
        ranks, model = cells[i][:2]
        pairs = " | ".join(f"{ours:,.5g} | {printed}" for *_, ours, printed in cells[i : i + 3])
        yield f"| {ranks} | {model} | {pairs} |"


def hybrid() -> Iterator[str]:
    """A model of 7.5B parameters on 64 ranks, 8 to a node: what rests on a rank, and what it sends in a step."""
    yield "| stage | sharded over | GB that rest | GB sent in the node | GB sent between nodes |"
    yield "|---|---|---|---|---|"
    model, ranks, node = Shape(36, 4096, 32, 32, 4 * 4096, 51200, 1024), 64, 8
    for stage in (1, 2, 3):
        for shard in (ranks, node):
            job = Job(model, Bytes(2, 2, 4), data=ranks, stage=stage, shard_ranks=shard, global_batch=ranks)
            share = sum(unit.padded(shard) for unit in units(model, 1)) // shard
            rest = sum(states(share, shard, stage, job.bytes).values())
            ways = split_by_node(job, traffic(job), node).values()
            gone = [sum(way[where] for way in ways) for where in ("in_node", "cross_node")]
            yield f"| {stage} | {shard} | " + " | ".join(f"{size / 1e9:.4g}" for size in (rest, *gone)) + " |"


def quantised() -> Iterator[str]:
    """The same in stage 3 as ZeRO++ sends it; last what leaves a node, in units of all parameters in 16 bits."""
    yield "| parameters | gradients | secondary ranks | GB that rest | GB sent | GB between nodes | of a node, x P |"
    yield "|---|---|---|---|---|---|---|"
    model, ranks, node = Shape(36, 4096, 32, 32, 4 * 4096, 51200, 1024), 64, 8
    plain = Job(model, Bytes(2, 2, 4), data=ranks, stage=3, global_batch=ranks)
    psi = sum(unit.padded(ranks) for unit in units(model, 1))
    for parameters, gradients, near in (
        ("none", "none", None),
        ("int8", "none", None),
        ("int8", "none", node),
        ("int8", "int4", None),
        ("int8", "int4", node),
    ):
        job = replace(plain, quantize_parameters=parameters, quantize_gradients=gradients, secondary_ranks=near)
        rest = sum(size for kind, size in memory(job, 0).held.items() if kind in RESTING)
        found = traffic(job)
        far = sum(way["cross_node"] for way in split_by_node(job, found, node).values())
        cells = [
            parameters,
            gradients,
            str(near or "null"),
            *(f"{size / 1e9:.4g}" for size in (rest, sum(sum(purposes.values()) for purposes in found.values()), far)),
        ]
        yield f"| {' | '.join(cells)} | {far * node / (2 * psi):.3f} |"


RESTING = ("parameters", "gradients", "optimizer", "secondary")
TABLES = (resting, paper, hybrid, quantised)

if __name__ == "__main__":
    print("\n\n".join("\n".join(table()) for table in TABLES))
