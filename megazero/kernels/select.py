"""Choose one implementation for each operation: `precision.kernels` auto | fused | apex | compile | reference.

The choice is made once, from the declared device and dtype, never from a tensor, and logged once. `auto` takes, for
each family of operations, the first available of: fused kernels (if they can be built, on the CPU with g++, on a GPU
with nvcc, and agree with the reference there, see `proof`), apex (on a GPU, if installed), the reference. `fused`,
`apex` and `compile` (the reference under torch.compile) require theirs, and use the reference for families that they
lack.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from megazero.base.errors import UserError
from megazero.kernels import apex, compiled, cpu, cuda, proof, reference, schema
from megazero.kernels.build import FOLDER_VARIABLE, BuildError
from megazero.kernels.operations import REFERENCE, WIDE_REFERENCE, Operations
from megazero.kernels.products import wide_products

_LOG = logging.getLogger("megazero")
_Operation = Callable[..., object]
_ORDER = {
    "auto": ("fused", "apex", "reference"),
    "fused": ("fused", "reference"),
    "apex": ("apex", "reference"),
    "compile": ("compile", "reference"),
    "reference": ("reference",),
}
# Operations that must have one implementation: a forward and its backward must agree on the kept tensors. "adamw"
# updates fp32 masters and writes 16-bit parameters in the same pass; without it, and for other dtypes, torch's fused
# AdamW runs, then a copy if needed (`optim/elements.py`). apex's FusedAdam has no advantage: it needs gradients in the
# parameters' dtype, already scaled, and counts updates on the host. apex has no norm of a sum either: the sum is then
# a separate pass, as in the reference.
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "norm": tuple(apex.NORMS),
        "norm of a sum": ("add_layer_norm", "add_layer_norm_backward", "add_rms_norm", "add_rms_norm_backward"),
        "gelu": ("bias_gelu", "bias_gelu_backward"),
        "swiglu": ("swiglu", "swiglu_backward"),
        "dropout": ("dropout_add", "dropout_backward"),
        "rotary": ("rotary",),
        "cross entropy": ("cross_entropy_parts_", "cross_entropy_backward_"),
        "flat": ("sum_rows_", "sums_of_squares", "accumulate_", "cast_"),
        "quantized": ("quantize_", "dequantize_"),
        "adamw": ("adamw_",),
    }
)
# By the kind of device: the compiler, and the function that loads the library.
_LIBRARIES: dict[str, tuple[str, Callable[[], Path]]] = {"cpu": ("g++", cpu.load), "cuda": ("nvcc", cuda.load)}


def for_host(preference: str, dtype: torch.dtype) -> Operations:
    """Return the operations for an update on the host of a GPU run: "reference" if preferred, else "auto"."""
    return choose("reference" if preference == "reference" else "auto", torch.device("cpu"), dtype)


def choose(
    preference: str, device: torch.device, dtype: torch.dtype, *, present: bool = True, deterministic: bool = False
) -> Operations:
    """Return the operations for a run on `device` with parameters of `dtype`.

    Args:
        present: the device exists on this machine; False: it is only declared, tensors have no data, and of fused
            kernels only the schemas are needed.
        deterministic: bit-identical results in every run, on a GPU too, so without atomics.

    Raises:
        UserError: 114, the requested implementation is not available, or "fused" and an operation is wrong.
    """
    own, reason = _implementations(preference, device, dtype, present)
    order = _ORDER[preference] if dtype in proof.DTYPES else ("reference",)
    base = REFERENCE if device.type == "cpu" else WIDE_REFERENCE
    chosen, taken = dict[str, str](), dict[str, _Operation]()
    for family, names in FAMILIES.items():
        chosen[family] = next((each for each in order if set(names) <= own.get(each, {}).keys()), "reference")
        taken |= {name: own[chosen[family]][name] for name in names if chosen[family] != "reference"}
    operations = replace(base, name=_summary(chosen), **taken)
    _LOG.info("kernels: %s (%s)", operations.name, reason)
    if preference == "auto" and device.type == "cuda" and dtype in proof.DTYPES and "fused" not in own:
        _LOG.warning(
            "kernels: this GPU runs plain torch instead of fused kernels, which is slower: %s; put nvcc on the PATH, "
            "or name a folder of built kernels in %s, or set precision.kernels=reference",
            *(reason, FOLDER_VARIABLE),
        )
    found = operations if taken else base
    if device.type == "cuda" and deterministic:
        found = replace(found, add_rows_=reference.add_sorted_rows_)
    if device.type == "cuda" and present and dtype.itemsize == 2 and torch.cuda.is_available():
        found = replace(found, wide_products=wide_products(device, dtype))
    return found


def _implementations(
    preference: str, device: torch.device, dtype: torch.dtype, present: bool
) -> tuple[dict[str, Mapping[str, _Operation]], str]:
    """Return the operations that each implementation has here, and the reason for the log.

    Raises:
        UserError: 114, as `choose`.
    """
    found, reason = dict[str, Mapping[str, _Operation]](), "asked for"
    if "fused" in _ORDER[preference]:
        operations, reason = _fused(device, dtype, present, required=preference == "fused")
        found |= {"fused": operations} if operations else {}
    if "apex" in _ORDER[preference] and device.type == "cuda" and not apex.lacking():
        found["apex"] = apex.NORMS
    elif preference == "apex":
        reason = "apex's CUDA extensions are not installed" if device.type == "cuda" else "apex has no CPU kernels"
    if preference == "compile" and not present:
        found["compile"] = {name: getattr(reference, name) for name in compiled.NAMES}
    elif preference == "compile" and not (lacking := compiled.lacking(device)):
        found["compile"] = compiled.operations()
    elif preference == "compile":
        reason = lacking
    if preference not in (*found, "auto", "reference"):
        raise UserError(114, reason, "use precision.kernels=auto", where=f"precision.kernels={preference}")
    return found, reason


def _fused(
    device: torch.device, dtype: torch.dtype, present: bool, *, required: bool
) -> tuple[dict[str, _Operation], str]:
    """Load our kernels; return the correct ones in a run's dtypes, and how they were built or why none can be used.

    Raises:
        UserError: 114, one is wrong although all are required.
    """
    ours = {name: getattr(getattr(torch.ops, schema.NAMESPACE), name) for name in schema.OPERATIONS}
    if device.type not in _LIBRARIES or dtype not in proof.DTYPES:
        return {}, f"fused kernels exist for fp32 and 16 bits, not for {dtype} on {device.type}"
    if not present:
        return ours, "supposed"
    compiler, load = _LIBRARIES[device.type]
    try:
        library = load()
    except BuildError as error:
        return {}, str(error)
    used = {str(each).removeprefix("torch.") for each in (dtype, torch.float32)}  # masters and sums are fp32
    faults = [fault for fault in proof.faults(library, device) if fault.dtype in used]
    right = {name: each for name, each in ours.items() if name not in {fault.operation for fault in faults}}
    if not right:  # for example, the compiler is too new for the driver
        return {}, f"none of the kernels works ({faults[0].error}); to build them again: `rm {library}`"
    for fault in faults:
        what = f"{fault.form} in {fault.dtype} is wrong on this {device.type}: {fault.error}"
        if required:
            raise UserError(114, what, "use precision.kernels=auto", where="precision.kernels=fused")
        _LOG.warning("kernels: %s; plain torch takes its place", what)
    return right, f"built with {compiler}"


def _summary(chosen: dict[str, str]) -> str:
    """Return "fused", or "reference; apex: norm": the most frequent implementation, then the exceptions."""
    most = max(dict.fromkeys(chosen.values()), key=list(chosen.values()).count)
    return most + "".join([f"; {name}: {family}" for family, name in chosen.items() if name != most])
