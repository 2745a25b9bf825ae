"""LayerNorm and RMSNorm, with and without the residual sum before them: fused, apex, reference.

apex (github.com/NVIDIA/apex, built with its CUDA extensions) has the norms without the sum. The sum is then a pass of
its own, as in the reference.
"""

import importlib
from functools import cache
from typing import Any

from torch import Tensor

from megazero.kernels.implementation import KERNEL_DTYPES, KernelImplementation, fused, specified

NAMES = ("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward")
NAMES_WITH_SUM = ("add_layer_norm", "add_layer_norm_backward", "add_rms_norm", "add_rms_norm_backward")


@cache
def _extension() -> Any:
    return importlib.import_module("fused_layer_norm_cuda")


def _apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _extension().forward_affine(x, weight.shape, weight, bias, eps)
    return y, _per_row(mean, x), _per_row(rstd, x)


def _apex_layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # The bias is asked for its shape and dtype only, eps for nothing when the input has been kept.
    return _extension().backward_affine(grad, mean.view(-1), rstd.view(-1), x, weight.shape, weight, weight, 0.0, False)


def _apex_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rrms = _extension().rms_forward_affine(x, weight.shape, weight, eps)
    return y, _per_row(rrms, x)


def _apex_rms_norm_backward(grad: Tensor, x: Tensor, rrms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _extension().rms_backward_affine(grad, rrms.view(-1), x, weight.shape, weight, 0.0, False)


def _per_row(statistic: Tensor, x: Tensor) -> Tensor:
    """apex returns statistics as one flat vector."""
    return statistic.view(*x.shape[:-1], 1)


_APEX = {
    "layer_norm": _apex_layer_norm,
    "layer_norm_backward": _apex_layer_norm_backward,
    "rms_norm": _apex_rms_norm,
    "rms_norm_backward": _apex_rms_norm_backward,
}
CANDIDATES = (fused(*NAMES), KernelImplementation("apex", _APEX, ("cuda",), KERNEL_DTYPES), specified(*NAMES))
CANDIDATES_WITH_SUM = (fused(*NAMES_WITH_SUM), specified(*NAMES_WITH_SUM))


def apex_is_there() -> bool:
    """Whether NVIDIA's apex is installed with its CUDA extensions: asked of its symbols, because the package that the
    index has under this name is another project's.
    """
    try:
        importlib.import_module("amp_C")
        optimizers = importlib.import_module("apex.optimizers")
        normalization = importlib.import_module("apex.normalization")
        _extension()
    except ImportError:
        return False
    return hasattr(optimizers, "FusedAdam") and hasattr(normalization, "FusedLayerNorm")
