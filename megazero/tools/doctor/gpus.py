"""Find the GPUs that torch can compute on, and those that it cannot.

Touches them: only after all ranks have been forked.
"""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from megazero.base.this_copy import here
from megazero.plan.hardware import peak_flops
from megazero.tools.doctor.finding import Finding, amount

_DRIVER = Path("/proc/driver/nvidia/version")


def gpus() -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as caught:  # why not, if not
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        why = " ".join(str(caught[-1].message).split())[:160] if caught else f"torch {torch.__version__} sees none"
        if _DRIVER.exists() or shutil.which("nvidia-smi"):
            do = "take a build of torch for this driver's CUDA: "
            do += here("make setup TORCH=...", "pip install torch==...")
            yield Finding("GPUs", f"there is an NVIDIA driver, but {why}", "absent", do)
        else:
            yield Finding("GPUs", "none; each rank computes on its share of the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sheet = peak_flops(properties.name, "bf16") or peak_flops(properties.name, "fp16")
        known = f"data sheet {amount(sheet, 'FLOP/s')} in 16 bits" if sheet else "not in our table of data sheets"
        text = f"{properties.name}, {amount(properties.total_memory, 'B')}, "
        text += f"compute capability {properties.major}.{properties.minor}; {known}"
        values = {"memory_bytes": properties.total_memory} | ({"sheet_flops": sheet} if sheet else {})
        yield Finding(f"GPU {index}", text, values=values)


def gpu_name() -> str:
    """Return the name of the first one, as the driver spells it."""
    return torch.cuda.get_device_name(0)
