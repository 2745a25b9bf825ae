"""Machines to plan for: what their data sheets say, and the share of it that training reaches.

A rate that training sees is the sheet's figure times a share that was fitted to published runs
(`scripts/fit_planner.py`, docs/planning.md): one set of shares for each kind of device, never for a model or a
row. Where no published run tells a share apart, it is that of the device before it, and `fitted` says so.
"""

from dataclasses import dataclass, replace

from megazero.plan.hardware import peak_flops


@dataclass(frozen=True)
class Efficiency:
    """The share of a data sheet's figures that training reaches.

    Attributes:
        matmul: of the peak, by a matrix product too large for its reads and writes to count.
        attention: of the peak, by fused attention, of the FLOPs that a causal mask leaves.
        memory: of the memory's bandwidth, by operations that compute next to nothing.
        in_node, cross_node: of the links' bandwidths, by rings.
        beside: of the time that a device computes, in which traffic along the data axis moves as if it did not.
        fitted: the source of these shares.
    """

    matmul: float
    attention: float
    memory: float
    in_node: float
    cross_node: float
    beside: float
    fitted: str


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes, as the planner sees it. Bandwidths are of one direction, in bytes a second.

    Attributes:
        name: the device's.
        memory_bytes: of a device.
        peaks: dense matmul FLOP/s by dtype.
        memory_bandwidth: of a device.
        devices_per_node: that talk over the node's own links.
        in_node_bandwidth, cross_node_bandwidth: of each device; several devices that share a network card have a part
            of it each.
        in_node_latency, cross_node_latency: seconds, of one step of a ring.
        host_bandwidth: between a device and the host, all devices at once.
        host_memory_bytes, host_memory_bandwidth: each device's part of the node's.
        price_per_hour: dollars for a device; None: not known.
        launch: seconds that a kernel takes if there is nothing to do.
        reached: the shares of these that training gets.
        disk_bytes, disk_read, disk_write: each device's part of the node's disks and of their bandwidth by direct I/O;
            0: there are none, or they are not known.
        nccl_channels: that NCCL makes for a collective among the devices of a node; 0: it is not used. NCCL_DEBUG=INFO
            shows them: 24 among 8 A100 on NVSwitch.
    """

    name: str
    memory_bytes: int
    peaks: dict[str, float]
    memory_bandwidth: float
    devices_per_node: int
    in_node_bandwidth: float
    in_node_latency: float
    cross_node_bandwidth: float
    cross_node_latency: float
    host_bandwidth: float
    host_memory_bytes: float
    host_memory_bandwidth: float
    price_per_hour: float | None
    launch: float
    reached: Efficiency
    nccl_channels: int = 24
    disk_bytes: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0

    def peak(self, item: int) -> float | None:
        """Return FLOP/s at so many bytes an element; of 16 bits the better of bf16 and fp16. None: not known."""
        names = {2: ("bf16", "fp16"), 4: ("fp32",), 8: ("fp64",)}[item]
        return max((self.peaks[name] for name in names if name in self.peaks), default=None)


def _peaks(device: str) -> dict[str, float]:
    found = {dtype: peak_flops(device, dtype) for dtype in ("bf16", "fp16", "fp32", "fp64")}
    return {dtype: peak for dtype, peak in found.items() if peak is not None}


# `python scripts/fit_planner.py --fit` prints these. The V100's stand for what its rows ran too: attention that stored
# its scores, and reductions beside nothing. Attention of the others lies between the kernels of two years: the Triton
# ones of LLM-Foundry's rows, which are slower, and flash-attention 2.
V100 = Efficiency(0.47, 0.05, 0.65, 0.90, 0.37, 0.0, "38 rows of the ZeRO paper; attention stands for theirs")
A100 = Efficiency(0.79, 0.37, 0.75, 0.63, 0.42, 1.0, "84 rows: SC21, K22, Zero Bubble, flash-attention 2, LLM-Foundry")
H100 = Efficiency(0.62, 0.19, 0.73, 0.75, 0.60, 1.0, "matmul, attention: 20 rows; memory as A100; links supposed")
H200 = replace(H100, fitted="as the H100, the same chip")
B200 = replace(H100, fitted="as the H100: no published run was used")

# Memory as the driver counts: what is sold as 80 GB are 80 GiB, as 141 GB 139 and as 180 GB 178. Prices are round
# numbers for on-demand cloud nodes, an assumption to be replaced by one's own.
_DGX_2 = Machine(  # DGX-2: 16 devices on NVSwitch, 8 x 100 Gb/s EDR, 1.5 TB of host memory
    name="v100-32gb",
    memory_bytes=32 * 2**30,
    peaks=_peaks("Tesla V100-SXM3-32GB"),
    memory_bandwidth=900e9,
    devices_per_node=16,
    in_node_bandwidth=150e9,
    in_node_latency=3e-6,
    cross_node_bandwidth=6.25e9,
    cross_node_latency=15e-6,
    host_bandwidth=6e9,
    host_memory_bytes=1.5e12 / 16,
    host_memory_bandwidth=256e9 / 16,
    price_per_hour=2.5,
    launch=4e-6,
    reached=V100,
    nccl_channels=12,
    disk_bytes=28.1e12 / 16,
    disk_read=1.6e9,  # ZeRO-Infinity (2104.07857), Fig. 2b, as the bytes; the others as supposed as their links
    disk_write=1.6e9,
)
_DGX_A100 = Machine(  # DGX A100: 8 devices on NVSwitch, 8 x 200 Gb/s HDR, 2 TB of host memory
    name="a100-80gb",
    memory_bytes=80 * 2**30,
    peaks=_peaks("NVIDIA A100-SXM4-80GB"),
    memory_bandwidth=2039e9,
    devices_per_node=8,
    in_node_bandwidth=300e9,
    in_node_latency=3e-6,
    cross_node_bandwidth=25e9,
    cross_node_latency=12e-6,
    host_bandwidth=16e9,
    host_memory_bytes=2e12 / 8,
    host_memory_bandwidth=400e9 / 8,
    price_per_hour=2.0,
    launch=4e-6,
    reached=A100,
    disk_bytes=30e12 / 8,
    disk_read=25e9 / 8,
    disk_write=25e9 / 8,
)
_DGX_H100 = Machine(  # DGX H100: 8 devices on NVSwitch, 8 x 400 Gb/s NDR, 2 TB of host memory
    name="h100-80gb",
    memory_bytes=80 * 2**30,
    peaks=_peaks("NVIDIA H100 80GB HBM3"),
    memory_bandwidth=3350e9,
    devices_per_node=8,
    in_node_bandwidth=450e9,
    in_node_latency=3e-6,
    cross_node_bandwidth=50e9,
    cross_node_latency=10e-6,
    host_bandwidth=50e9,
    host_memory_bytes=2e12 / 8,
    host_memory_bandwidth=600e9 / 8,
    price_per_hour=3.0,
    launch=4e-6,
    reached=H100,
    disk_bytes=30e12 / 8,
    disk_read=25e9 / 8,
    disk_write=25e9 / 8,
)
_DGX_H200 = replace(  # DGX H200: the H100 with more and faster memory
    _DGX_H100,
    name="h200",
    memory_bytes=139 * 2**30,
    peaks=_peaks("NVIDIA H200"),
    memory_bandwidth=4800e9,
    price_per_hour=3.5,
    reached=H200,
)
_DGX_B200 = replace(  # DGX B200: NVLink 5, otherwise as the H100's node
    _DGX_H100,
    name="b200",
    memory_bytes=178 * 2**30,
    peaks=_peaks("NVIDIA B200"),
    memory_bandwidth=8000e9,
    in_node_bandwidth=900e9,
    price_per_hour=5.0,
    reached=B200,
)
MACHINES = {machine.name: machine for machine in (_DGX_2, _DGX_A100, _DGX_H100, _DGX_H200, _DGX_B200)}
