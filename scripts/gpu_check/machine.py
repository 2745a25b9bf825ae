"""Describe the origin of the figures: the machine, its software, and the commit of the code."""

import importlib.metadata
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.cuda import nccl

from megazero.kernels.build import BuildError, find_nvcc
from scripts.bench.figures import commit, machine
from scripts.gpu_check.findings import Asked, Row

DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("numpy", "xxhash", "einops", "safetensors", "triton", "liger-kernel", "pydantic", "ruamel.yaml", "wandb")


def rows(asked: Asked) -> Iterator[Row]:
    """Yield one row of facts, then a row for each optional package that is missing, and one for nvcc."""
    facts: Row = {"name": "machine", "commit": commit() or "-", "host": machine(), "system": platform.platform()}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "-"}
    facts["temporary_gb_free"] = shutil.disk_usage(tempfile.gettempdir()).free / 1e9
    if asked.on_gpu and not torch.cuda.is_available():
        yield facts | {"fault": "torch sees no GPU; --device cpu tries the same steps without one"}
        return
    if asked.on_gpu:
        facts |= _of_gpu(asked.device)
    yield facts | {"packages": {name: version(name) for name in PACKAGES}}
    for name in PACKAGES:
        if version(name) is None:
            yield {"name": name, "absent": "not installed"}
    try:
        yield {"name": "nvcc", "where": find_nvcc()}
    except BuildError as error:
        yield {"name": "nvcc", "absent": str(error)}


def _of_gpu(device: torch.device) -> Row:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "gpu_gib": properties.total_memory / 2**30,
        "driver": DRIVER.read_text().splitlines()[0] if DRIVER.exists() else "-",
        "nccl": ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else "-",
        "cudnn": str(torch.backends.cudnn.version()),
    }


def version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
