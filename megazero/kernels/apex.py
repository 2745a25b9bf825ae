"""Wrap LayerNorm and RMSNorm of NVIDIA's apex (github.com/NVIDIA/apex, built with its CUDA extensions)."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megazero.kernels import reference

_NAMES = ("amp_C", "apex.optimizers:FusedAdam", "apex.normalization:FusedLayerNorm", "fused_layer_norm_cuda")


@cache
def _extension() -> Any:
    return importlib.import_module("fused_layer_norm_cuda")


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    if offset:  # apex has none
        return reference.layer_norm(x, weight, bias, eps, offset)
    y, mean, rstd = _extension().forward_affine(x, weight.shape, weight, bias, eps)
    return y, _per_row(mean, x), _per_row(rstd, x)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    if offset:
        return reference.layer_norm_backward(grad, x, mean, rstd, weight, offset)
    # apex reads only shape and dtype of the bias, so the weight serves; eps is unused if the input was kept.
    rows = mean.view(-1), rstd.view(-1)
    grad_x, *sums = _extension().backward_affine(grad, *rows, x, weight.shape, weight, weight, 0.0, False)
    return grad_x, sums[0].float(), sums[1].float()


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, twice: bool = True) -> tuple[Tensor, Tensor]:
    if offset or (twice and x.dtype.itemsize == 2):  # apex has no offset, and rounds once
        return reference.rms_norm(x, weight, eps, offset, twice)
    y, rrms = _extension().rms_forward_affine(x, weight.shape, weight, eps)
    return y, _per_row(rrms, x)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, rrms: Tensor, weight: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    if offset:
        return reference.rms_norm_backward(grad, x, rrms, weight, offset)
    grad_x, grad_weight = _extension().rms_backward_affine(grad, rrms.view(-1), x, weight.shape, weight, 0.0, False)
    return grad_x, grad_weight.float()


def _per_row(statistic: Tensor, x: Tensor) -> Tensor:
    """Return a statistic, which apex returns as a flat vector, in the shape [..., 1]."""
    return statistic.view(*x.shape[:-1], 1)


NORMS: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "layer_norm": _layer_norm,
        "layer_norm_backward": _layer_norm_backward,
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
    }
)


def lacking() -> list[str]:
    """Return the modules and functions of NVIDIA's apex that are missing here; an empty list if all are here.

    All of them are checked, because the package `apex` on PyPI is another project.
    """
    return [name.replace(":", ".") for name in _NAMES if not _is_here(name)]


def _is_here(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
