"""A step over slow links beside what `plan` says of it: values sent as they are, and as integers (ZeRO++).

    python scripts/bench/links.py [--rate 500] [--launches 3] [--pairs 21] [--only PATTERN ...] [--json] [--save]

Two hosts are two network namespaces of this machine (Linux, root, iproute2), and the link between them a pair of
virtual cards that let through so many megabits a second each way (`tc tbf`). In the first table each host has one rank,
in the second two, of which neighbours of a host keep second shards; each rank one thread. All ranks talk through
sockets: within a host nothing holds them up. The model (4 layers, hidden 512, vocabulary 4,096, sequence 256) trains in
stage 3, one sequence on each rank, in fp32.

Before the steps, `megazero doctor` measures the machine, and an all-gather of 16 MB each kind of link: bandwidth,
latency, and the share of the time in which processors are free to compute. With these `plan` says the seconds of each
step. *Planned* are these, *planned ratio* is that to the plan of the reference, and *planned / measured* the ratio of
that to the measured one.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch

from megazero.build.assemble import neighbours_of
from megazero.build.job import job_of
from megazero.comm.collectives import all_gather
from megazero.comm.grid import Axis, Grid, make_grid
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.kernels.select import choose
from megazero.launcher.environment import stay_on
from megazero.plan.machines import Machine
from megazero.plan.time import step_time
from scripts.bench import figures
from scripts.bench.harness import Group, add_options, chosen, measure, rows_of
from scripts.bench.ours import CPU, SOCKETS, comm_of, engine_step
from scripts.bench.plan import BASE, measured_machine
from scripts.bench.processes import Call, System, running

RATE = 500  # megabits a second
HOSTS = ("mzlink0", "mzlink1")
_CARD, _NETWORK = "eth0", "10.78.0"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)
_MESSAGE, _TRIES = 16 << 20, 5  # bytes of an all-gather, and how many of them
INT8, INT4, NEAR = "zero.quantize.parameters=int8", "zero.quantize.gradients=int4", "zero.secondary_ranks=2"
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "as they are": (),
    "parameters int8": (INT8,),
    "gradients int4": (INT4,),
    "parameters int8, gradients int4": (INT8, INT4),
    "second shards": (NEAR,),
    "second shards, int8, int4": (NEAR, INT8, INT4),
}
TABLES = {"one rank on each host": (2, 4), "two ranks on each host": (4, 6)}  # ranks, variants from the first on


@dataclass(frozen=True)
class Link:
    """What a kind of link was measured to do: bytes a second of a rank, all sending, and seconds of a message.

    Attributes:
        free: the share of the time of a large message in which the processors have nothing to do with it.
    """

    bandwidth: float
    latency: float
    free: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=RATE, help="megabits a second between hosts (default: %(default)s)")
    add_options(parser)
    options = parser.parse_args()
    with two_hosts(options.rate):
        reports = (report_of(title, *what, options) for title, what in TABLES.items())
        return figures.tell(reports, as_json=options.json, save=options.save)


def report_of(title: str, ranks: int, variants: int, options: argparse.Namespace) -> figures.Report:
    """Measure links and steps of so many ranks, and put the plans beside them."""
    machine = linked(measured_machine(ranks), ranks)
    systems = [System(name, build, (name,), 1, ranks, SOCKETS) for name in list(VARIANTS)[:variants]]
    group = Group(title, chosen(systems, options.only))
    rounds = -(-options.pairs // options.launches)
    found = measure([*group.systems, replace(systems[0], name=f"{systems[0].name}, again")], options.launches, rounds)
    planned = {one.name: planned_seconds(one.name, ranks, machine) for one in group.systems}
    rows = rows_of(group, found)
    for row in rows:
        said = planned[row["system"].removesuffix(", again")]
        ratio = said / planned[systems[0].name]
        row["columns"] = {"planned s": said, "planned ratio": ratio, "planned / measured": ratio / row["ratio"]}
    about = f"{title}, {options.rate} Mbit/s between them"
    return figures.report_of(about, rows, launches=options.launches, rounds=rounds, foreign=found.foreign)


def planned_seconds(name: str, ranks: int, machine: Machine) -> float:
    return step_time(job_of(config_of(name, ranks), ranks), machine).step_s


def config_of(name: str, ranks: int) -> Config:
    options = [*(f"model.{size}" for size in BASE), f"batch.global={ranks}", "batch.micro=1", "zero.stage=3"]
    return load("tiny", [*options, *VARIANTS[name]])


def linked(machine: Machine, ranks: int) -> Machine:
    """Return the machine with links as they are measured between ranks that do nothing else."""
    each = ranks // len(HOSTS)
    with running([System("links", links_of, (), 1, ranks, SOCKETS, has_loss=False)]) as (one,):
        found = {}
        for kind in ("between hosts", *["in a host"] * (each > 1)):
            calls = (f"{kind}, {size}" for size in ("large", "small"))
            large, small = (min((one.do(call) for _ in range(_TRIES)), key=lambda done: done.seconds) for call in calls)
            others = len(HOSTS) - 1 if kind == "between hosts" else each - 1
            bandwidth = others * _MESSAGE / (large.seconds - small.seconds)
            busy = large.processor / (min(ranks, len(os.sched_getaffinity(0))) * large.seconds)
            found[kind] = Link(bandwidth, small.seconds / others, 1 - busy)
    far = found["between hosts"]
    near = found.get("in a host", far)
    return replace(
        machine,
        devices_per_node=each,
        in_node_bandwidth=near.bandwidth,
        in_node_latency=near.latency,
        cross_node_bandwidth=far.bandwidth,
        cross_node_latency=far.latency,
        reached=replace(machine.reached, in_node=1.0, cross_node=1.0, beside=max(0.0, far.free)),
    )


def links_of(rank: int, size: int, store: str) -> Mapping[str, Call]:
    """Return a large and a small all-gather among the ranks of a host, and among those of one place of all hosts."""
    grid = _grid(rank, size, store, size // len(HOSTS))
    axes = {"between hosts": grid["replica"] if size > len(HOSTS) else grid["data"], "in a host": grid["shard"]}
    kinds = {kind: axis for kind, axis in axes.items() if axis.size > 1}
    sizes = {"large": _MESSAGE, "small": 1}
    return {f"{kind}, {word}": _gather(axis, count) for kind, axis in kinds.items() for word, count in sizes.items()}


def _gather(axis: Axis, count: int) -> Call:
    part = torch.zeros(count, dtype=torch.uint8)

    def call() -> float:
        all_gather(part, axis, "link")
        return 0.0

    return call


def build(name: str, rank: int, size: int, store: str) -> Call:
    """Return a step of a rank, which returns its loss."""
    config = config_of(name, size)
    return engine_step(config, _grid(rank, size, store, neighbours_of(config)), choose("auto", CPU, torch.float32))


def _grid(rank: int, size: int, store: str, neighbours: int | None) -> Grid:
    """Enter the namespace of this rank's host, and meet the others there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{HOSTS[rank * len(HOSTS) // size]}") as host:
        if libc.setns(host.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
    stay_on(_CARD)
    _, comm = comm_of(rank, size, store, transport=SOCKETS)
    shards = neighbours if neighbours not in (None, size) else None
    return make_grid(comm=comm, device_type="cpu", shard_ranks=shards)


@contextmanager
def two_hosts(rate: int) -> Iterator[None]:
    """Make two namespaces with a link of so many megabits a second between them; delete them at the end.

    Raises:
        SystemExit: this machine does not let us.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        _made(rate)
        yield
    finally:
        _deleted()


def _deleted() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def _made(rate: int) -> None:
    _deleted()  # those of a run that was killed
    one, other = HOSTS
    commands = [["ip", "netns", "add", host] for host in HOSTS]
    commands.append(["ip", "link", "add", _CARD, "netns", one, "type", "veth", "peer", "name", _CARD, "netns", other])
    for number, host in enumerate(HOSTS, 1):
        commands += [
            ["ip", "-n", host, "addr", "add", f"{_NETWORK}.{number}/24", "dev", _CARD],
            ["ip", "-n", host, "link", "set", _CARD, "up"],
            ["ip", "-n", host, "link", "set", "lo", "up"],
            ["tc", "-n", host, "qdisc", "add", "dev", _CARD, "root", "tbf"],
        ]
        commands[-1] += ["rate", f"{rate}mbit", "burst", "256kb", "latency", "200ms"]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise SystemExit(f"{command[0]}: {error.strerror}; the links need iproute2") from None
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}; the links need Linux and root")


if __name__ == "__main__":
    sys.exit(main())
