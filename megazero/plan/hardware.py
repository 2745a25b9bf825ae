"""Peak arithmetic of accelerators, against which MFU is measured.

    MFU = model FLOPs per second and device / peak dense matmul FLOP/s in the compute dtype     (PaLM, appendix B)

Peaks are the vendor's data sheet figures for dense products: sheets that print the number "with sparsity" are halved.
fp32 is the plain fp32 rate: TF32 is not assumed, since it is a different arithmetic and off by default in torch.
fp64 is the tensor core rate where there is one, since matrix products use it.

An unknown device (any CPU, a slice of a GPU, a chip not in the table) has no peak: MFU is then null, not a guess.
"""

import re
from pathlib import Path

from megazero.base.yaml_text import parse_yaml

# Rows: `pattern` of the name as the driver spells it, `tflops` by dtype, `source`.
DEVICES = parse_yaml(Path(__file__).with_name("devices.yaml").read_text())


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak dense matmul FLOP/s of one device, or None where it is not known.

    Args:
        device_name: as torch.cuda.get_device_name() gives it, for example "NVIDIA A100-SXM4-80GB".
        dtype: the dtype of the matrix products: fp32, fp64, bf16 or fp16.
    """
    if re.search(r"\bMIG\b", device_name):  # a slice of a GPU: the driver does not report its number of units
        return None
    found = next((device["tflops"] for device in DEVICES if re.search(device["pattern"], device_name)), {})
    return found[dtype] * 1e12 if dtype in found else None
