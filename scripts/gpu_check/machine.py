"""What the figures belong to: the machine, its software, and the state of the code."""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.cuda import nccl

from megazero.kernels.build import BuildError, find_nvcc
from scripts.gpu_check.findings import Asked, Row

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "xxhash", "einops", "safetensors", "triton", "liger-kernel", "pydantic", "ruamel.yaml", "wandb")


def rows(asked: Asked) -> Iterator[Row]:
    """Yield one row of facts; then one for what the check can do without."""
    facts: Row = {"name": "machine", "commit": commit(), "torch": torch.__version__, "cuda": torch.version.cuda or "-"}
    facts |= {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "host_torch_threads": torch.get_num_threads(),
    }
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
        "multiprocessors": properties.multi_processor_count,
        "level_2_megabytes": properties.L2_cache_size >> 20,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nccl": ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else "-",
        "cudnn": str(torch.backends.cudnn.version()),
    }


def version(package: str) -> str | None:
    """Return the installed version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of the code, and whether files were changed since; "-" where there is no repository."""
    found = _said("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = found != "-" and _said("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") != "-"
    return f"{found} and changes" if changed else found


def _said(*command: str) -> str:
    """Return the first line that a command prints; "-" where there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "-"
    return next(iter(done.stdout.splitlines()), "-") if done.returncode == 0 else "-"
