"""Peak arithmetic of accelerators: what MFU is measured against.

    MFU = model FLOPs per second and device / peak dense matmul FLOP/s in the compute dtype     (PaLM, appendix B)

Peaks are the vendor's data sheet figures for dense products: sheets that print the number "with sparsity" are halved.
fp32 is the plain fp32 rate: TF32 is not assumed, since it is another arithmetic and off by default in torch.
fp64 is the tensor core rate where there is one, since matrix products use it.

An unknown device (any CPU, a slice of a GPU, a chip not in the table) has no peak: MFU is then null, never a guess.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One row of the table: the name as the driver spells it, and peaks in FLOP/s by dtype."""

    pattern: str
    peaks: dict[str, float]
    source: str

    def matches(self, device_name: str) -> bool:
        return re.search(self.pattern, device_name) is not None


def _peaks(half: float, fp32: float, fp64: float) -> dict[str, float]:
    """Convert peaks from TFLOP/s to FLOP/s; bf16 runs at the rate of fp16 from Ampere on."""
    return {"bf16": half * 1e12, **_volta(half, fp32, fp64)}


def _volta(half: float, fp32: float, fp64: float) -> dict[str, float]:
    """Return Volta's peaks: it has no bf16 matrix units, so no peak and no MFU in bf16."""
    return {"fp16": half * 1e12, "fp32": fp32 * 1e12, "fp64": fp64 * 1e12}


# The first row that matches decides: cards with a form factor in their name come before the bare name.
DEVICES: tuple[Device, ...] = (
    Device(r"\bV100S-PCIE", _volta(130, 16.4, 8.2), "NVIDIA V100 data sheet, Jan 2020, V100S PCIe"),
    Device(r"\bV100-PCIE", _volta(112, 14, 7), "NVIDIA V100 data sheet, Jan 2020, V100 PCIe"),
    Device(r"\bV100-SXM", _volta(125, 15.7, 7.8), "NVIDIA V100 data sheet, Jan 2020, V100 SXM2"),
    Device(r"\bA100\b", _peaks(312, 19.5, 19.5), "NVIDIA A100 data sheet, Jun 2021 (SXM and PCIe alike)"),
    Device(r"\bH100 PCIe", _peaks(756, 51, 51), "NVIDIA H100 data sheet, 2022, PCIe; half of 1513 with sparsity"),
    Device(r"\bH100 NVL", _peaks(835, 60, 60), "NVIDIA H100 data sheet, 2024, NVL; half of 1671 with sparsity"),
    Device(r"\bH100\b", _peaks(989, 67, 67), "NVIDIA H100 data sheet, 2024, SXM; half of 1979 with sparsity"),
    Device(r"\bGH200\b", _peaks(989, 67, 67), "NVIDIA GH200 data sheet, 2024; half of 1979 with sparsity"),
    Device(r"\bH200 NVL", _peaks(835, 60, 60), "NVIDIA H200 data sheet, 2024, NVL; half of 1671 with sparsity"),
    Device(r"\bH200\b", _peaks(989, 67, 67), "NVIDIA H200 data sheet, 2024, SXM; half of 1979 with sparsity"),
    Device(r"\bGB200\b", _peaks(2500, 80, 40), "NVIDIA Blackwell data sheet, 2025, GB200; half of 5000 with sparsity"),
    Device(r"\bB200\b", _peaks(2250, 75, 37), "NVIDIA Blackwell data sheet, 2025, B200; half of 4500 with sparsity"),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak dense matmul FLOP/s of one device, or None where it is not known.

    Args:
        device_name: as torch.cuda.get_device_name() gives it, for example "NVIDIA A100-SXM4-80GB".
        dtype: the dtype of the matrix products: fp32, fp64, bf16 or fp16.
    """
    if re.search(r"\bMIG\b", device_name):  # a slice of a card: the driver does not say of how many units
        return None
    for device in DEVICES:
        if device.matches(device_name):
            return device.peaks.get(dtype)
    return None
