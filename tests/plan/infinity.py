"""The ZeRO-Infinity paper's tables from the planner's closed formulas: what each tier holds, and how fast it has to be.

python -m tests.plan.infinity        prints the tables of docs/planning.md

(Rajbhandari et al. 2021, arXiv 2104.07857, sections 3 and 4, figures 2a and 6a, table 3.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megazero.plan.job import Bytes, Job
from megazero.plan.layers import parameters
from megazero.plan.machines import MACHINES
from megazero.plan.memory import DISK, HOST, memory
from megazero.plan.model import Shape
from megazero.plan.share import Share
from megazero.plan.traffic import Flow, flows

PEAK = 70e12  # FLOP/s that a V100 reaches, as the paper measured; section 4.2
RANKS, TOKENS = 512, 1024  # devices of its cluster, tokens of a sequence
STATES = {f"{where}{kind}" for where in ("", HOST, DISK) for kind in ("parameters", "gradients", "optimizer")}


def model(hidden: int, layers: int) -> Shape:
    """Return a GPT of the paper."""
    return Shape(layers, hidden, 16, 16, 4 * hidden, 50304, TOKENS)


def efficiency(intensity: float, bandwidth: float) -> float:
    """Return the share of the peak that is left where so many FLOPs are done for a byte; section 4.1, equation 6."""
    return intensity * bandwidth / (intensity * bandwidth + PEAK)


def needed(intensity: float, share: float) -> float:
    """Return the bytes a second for a share of the peak."""
    return share / (1 - share) * PEAK / intensity


def intensities(hidden: int, batch: int, layers: int = 4) -> dict[str, float]:
    """Return the FLOPs of a step for each byte that a rank moves of parameters and gradients, of the optimizer's state
    (an update reads and writes it), and of the inputs that full recompute keeps; of the blocks, which are nearly all.
    """
    job = Job(model(hidden, layers), Bytes(2, 2, 4), data=RANKS, stage=3, micro_batch=batch, global_batch=batch * RANKS)
    job = replace(
        job, recompute="full", partition=True, offload="cpu", offload_optimizer="nvme", offload_parameters="nvme"
    )
    share = Share(job, job.kinds(range(layers + 1)), False, False)
    elements = share.updated * RANKS
    work = 8 * batch * TOKENS * elements  # forward, forward again, backward
    item, own = job.bytes, list(flows(share))
    return {
        "parameters and gradients": work / (item.parameter * sum(share.gathers) + item.gradient * elements),
        "optimizer state": work / (item.moved_by_update(8) * elements),
        "block inputs": work / _moved(own, "inputs out", "inputs back"),
    }


def _moved(own: list[Flow], *purposes: str) -> int:
    return sum(flow.bytes for flow in own if flow.axis == "host" and flow.purpose in purposes)


def theirs(hidden: int, batch: int) -> dict[str, float]:
    """Return the paper's; section 4.1, equations 9 to 11."""
    tokens = batch * TOKENS
    return {"parameters and gradients": tokens, "optimizer state": tokens / 4, "block inputs": 24 * hidden}


@dataclass(frozen=True)
class Need:
    """A bandwidth that the paper asks for.

    Attributes:
        share: of the peak, at a batch of so many sequences on a device and a hidden size.
        printed: bytes a second.
    """

    what: str
    hidden: int
    batch: int
    share: float
    printed: float
    where: str


NEEDS = (
    Need("parameters and gradients", 8192, 1, 0.5, 70e9, "between devices"),
    Need("optimizer state", 8192, 2, 0.9, 1.5e12, "all devices together"),
    Need("block inputs", 2048, 1, 0.5, 2e9, "of a device"),
    Need("block inputs", 8192, 1, 0.5, 1e9, "of a device"),
)
# Billions of parameters that the paper trained on a DGX-2: 16 V100 of 32 GB, 1.5 TB, 28 TB of disks. Figure 6a.
TIERS: tuple[tuple[str, dict[str, object], float], ...] = (
    ("data parallel", {"stage": 0}, 1.4),
    ("ZeRO-2", {"stage": 2}, 10),
    ("ZeRO-Offload", {"stage": 2, "offload_optimizer": "cpu"}, 13),
    ("ZeRO-3", {"stage": 3}, 20),
    ("ZeRO-Infinity, host", {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}, 70),
    ("ZeRO-Infinity, disks", {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}, 1000),
)


def held(how: dict[str, object]) -> dict[str, float]:
    """Return the bytes of model states for each parameter that a rank of 16 holds on the device, the host, disks."""
    job = replace(Job(model(8192, 62), Bytes(2, 2, 4), data=16, global_batch=16), **how)  # type: ignore[arg-type]
    found = {kind: size for kind, size in memory(job, 0).held.items() if kind in STATES}
    whole, places = parameters(job.shape), {"device": 0.0, "host": 0.0, "disk": 0.0}
    for kind, size in found.items():
        place = "host" if kind.startswith(HOST) else "disk" if kind.startswith(DISK) else "device"
        places[place] += size / whole
    return places


def largest(how: dict[str, object]) -> float:
    """Return the parameters whose states fill the first of the tiers; activations and buffers not counted."""
    machine = MACHINES["v100-32gb"]
    room = {"device": machine.memory_bytes, "host": machine.host_memory_bytes, "disk": machine.disk_bytes}
    return min(room[place] / size for place, size in held(how).items() if size > 0.01)


def needs() -> Iterator[str]:
    heads = "| what moves | hidden, batch | share of the peak | FLOPs a byte: paper | ours"
    yield f"{heads} | GB/s needed: paper's formula | ours | printed |"
    yield "|---|---|---|---|---|---|---|---|"
    for need in NEEDS:
        paper, own = (found(need.hidden, need.batch)[need.what] for found in (theirs, intensities))
        rates = " | ".join(f"{needed(each, need.share) / 1e9:,.3g}" for each in (paper, own))
        what = f"| {need.what}, {need.where} | {need.hidden}, {need.batch} | {need.share:.0%}"
        yield f"{what} | {paper:,.0f} | {own:,.0f} | {rates} | {need.printed / 1e9:,.3g} |"


def tiers() -> Iterator[str]:
    yield "| | on the device | on the host | on disks | states alone fill a tier at | trained in the paper |"
    yield "|---|---|---|---|---|---|"
    for name, how, printed in TIERS:
        cells = " | ".join(f"{size:.3g}" for size in held(how).values())
        yield f"| {name} | {cells} | {largest(how) / 1e9:,.3g} B | {printed:,.3g} B |"


if __name__ == "__main__":
    print("\n\n".join("\n".join(table()) for table in (needs, tiers)))
