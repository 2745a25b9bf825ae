"""Machines to plan for: the figures of their data sheets, and the share of them that training reaches.

The rate in training is the sheet's figure times a share that was fitted to published runs
(`scripts/fit_planner.py`, docs/planning.md): one set of shares for each kind of device, never for a model or a
row. Where published runs do not determine a share, it is copied from the previous device, and `fitted` says so.

`machines.yaml` has the machines that are known by name. A user's file has the same fields
(`tools/planning/machine_file.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from megazero.base.yaml_text import parse_yaml

# Bounds far beyond any machine. Within them the formulas neither overflow nor divide by a value that rounds to zero.
# They are checked when a file is read.
_Rate = Annotated[float, Field(ge=1, le=1e24)]  # FLOP/s or bytes/s
_Seconds = Annotated[float, Field(ge=1e-12, le=1e3)]
_Bytes = Annotated[int, Field(ge=1, le=2**60)]
_Share = Annotated[float, Field(ge=1e-6, le=1)]

# The rate of fused attention over that of products where a file does not say: between the ratios of published runs on
# an A100 (0.47) and an H100 (0.31).
_ATTENTION = 0.4


class _InFile:
    """A part of a machine file; unknown fields are refused."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Link(_InFile):
    """A link of a device to others: bytes a second in one direction, and the seconds of one step of a ring."""

    bandwidth: _Rate
    latency: _Seconds


@dataclass(frozen=True)
class Disk(_InFile):
    """A device's part of its node's disks: bytes, and bytes a second by direct I/O."""

    bytes: _Bytes
    read: _Rate
    write: _Rate


@dataclass(frozen=True)
class Efficiency(_InFile):
    """The share of a data sheet's figures that training reaches.

    Attributes:
        matmul: of the peak, by a matrix product so large that its reads and writes do not count.
        attention: of the peak, by fused attention, for the FLOPs that a causal mask leaves; None: not known.
        memory: of the memory's bandwidth, by memory-bound operations.
        in_node, cross_node: of the links' bandwidths, by rings.
        beside: of the computing time, in which traffic on the data axis proceeds as if the device were idle.
        fitted: the source of these shares.
    """

    matmul: _Share = 1.0
    attention: _Share | None = None
    memory: _Share = 1.0
    in_node: _Share = 1.0
    cross_node: _Share = 1.0
    beside: Annotated[float, Field(ge=0, le=1)] = 1.0
    fitted: str = "from a file"

    @property
    def fused_attention(self) -> float:
        """Return the share of the peak that fused attention reaches, assumed where it is not known."""
        return _ATTENTION * self.matmul if self.attention is None else self.attention


@dataclass(frozen=True)
class Machine(_InFile):
    """A cluster of equal nodes, as the planner models it. Bandwidths are for one direction, in bytes a second.

    Attributes:
        name: name of the device.
        memory_bytes: memory of a device.
        peak_flops: dense matmul FLOP/s by dtype.
        memory_bandwidth: bandwidth of a device's memory.
        devices_per_node: number of devices connected by the node's own links.
        in_node, cross_node: links of each device; devices that share a network card each have a part of it.
        host_link_bandwidth: between a device and the host, with all devices active.
        host_memory_bytes, host_memory_bandwidth: a device's part of the node's; None: `host_link_bandwidth`.
        disk: a device's part of the disks; None: there are none, or they are not known.
        price_per_hour: dollars for a device; None: not known.
        launch: seconds of an empty kernel.
        nccl_channels: number that NCCL creates for a collective among the devices of a node; 0: NCCL is not used.
            NCCL_DEBUG=INFO shows it: 24 among 8 A100 on NVSwitch.
        reached: the shares of these figures that training reaches.
    """

    name: Annotated[str, Field(pattern=r"^[^\p{C}]{1,100}$")]
    memory_bytes: _Bytes
    peak_flops: dict[Literal["bf16", "fp16", "fp32", "fp64"], _Rate]
    memory_bandwidth: _Rate
    devices_per_node: Annotated[int, Field(ge=1, le=2**20)]
    in_node: Link
    cross_node: Link
    host_link_bandwidth: _Rate
    host_memory_bytes: _Bytes
    host_memory_bandwidth: _Rate | None = None
    disk: Disk | None = None
    price_per_hour: Annotated[float, Field(gt=0, le=1e9)] | None = None
    launch: _Seconds = 4e-6
    nccl_channels: Annotated[int, Field(ge=0, le=64)] = 24
    reached: Efficiency = Efficiency()

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of a device's part of the disks; 0: there are none, or they are not known."""
        return 0 if self.disk is None else self.disk.bytes

    def peak(self, item: int) -> float | None:
        """Return the peak FLOP/s for elements of `item` bytes (2: the larger of bf16 and fp16); None: not known."""
        dtypes = {2: ("bf16", "fp16"), 4: ("fp32",), 8: ("fp64",)}[item]
        return max((peak for dtype, peak in self.peak_flops.items() if dtype in dtypes), default=None)


_SHIPPED = parse_yaml(Path(__file__).with_name("machines.yaml").read_text())
MACHINES = {machine.name: machine for machine in TypeAdapter(list[Machine]).validate_python(_SHIPPED)}
