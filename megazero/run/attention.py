"""Choose the implementation of attention on a GPU, and log it.

torch has four implementations of causal attention, and silently takes the first that fits in an order of its own. One
of them, plain products (math), materialises the scores, S^2 numbers per head: 4 GB per sample and layer for 32 heads at
8,192 tokens in 16 bits. This module chooses one before the first step, and disables the others:

    cudnn       on Hopper and data-centre Blackwell, from cuDNN 9.15.1 on (before, some lengths gave wrong numbers); not
                with `run.deterministic`, nor for documents of many lengths, because each length needs a new plan
    flash       16 bits, compute capability 8.0 and later
    efficient   also fp32, and older GPUs
    math        if nothing else fits, with a warning

Documents (`data.mask_eod`) and windows use torch's variable-length flash attention if it works here; else attention
runs for one length at a time, and windows in blocks, as scores with a soft cap do everywhere. On a CPU there is one
implementation, and it always gives the same bits.

Measured on one H100 with torch 2.11 (docs/gpu_h100.md). The order was read in torch's sources (2.10 to 2.13); tests
replace torch's answers by others.
"""

import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.builders.assemble import DTYPES
from megazero.builders.pipeline import model_shape
from megazero.config.schema import Config
from megazero.launcher.environment import fix_cublas_workspace
from megazero.model.attention import Attention, VariableLength
from megazero.model.transformer import Transformer
from megazero.observe.sinks import warn

_CUDNN = 91501
_FUSED = ("cudnn", "flash", "efficient")


@dataclass(frozen=True)
class Heads:
    """The heads of one rank: query heads, key-value heads, channels per head, and tokens per sequence."""

    queries: int
    keys: int
    channels: int
    seq_len: int


@dataclass(frozen=True)
class AttentionChoice:
    """The way attention is computed.

    Attributes:
        name: cudnn, flash, efficient or math.
        repeats: whether keys and values are repeated for each query head.
        variable_length: attention for documents and windows; None: documents of one length at a time.
        why: the text of a warning; "" for none.
    """

    name: str
    repeats: bool
    variable_length: VariableLength | None
    why: str

    def __str__(self) -> str:
        return self.name + " with repeated keys" * self.repeats


class Probe:
    """Questions to torch and a GPU, whose answers decide the choice.

    Args:
        device: a GPU.
        dtype: the dtype of activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: Heads):
        self._device, self._dtype, self._heads = device, dtype, heads

    def prefers_cudnn(self) -> bool:
        """Return whether cuDNN's attention is the fastest here, and correct."""
        version = torch.backends.cudnn.version() or 0
        return torch.cuda.get_device_capability(self._device) in ((9, 0), (10, 0)) and version >= _CUDNN

    def refusal(self, name: str, *, repeats: bool) -> str | None:
        """Return why torch refuses an implementation for these heads; None: it accepts it."""
        heads = self._heads
        take(name)  # torch answers only for enabled ones
        shapes = [(heads.queries if each == "q" or repeats else heads.keys) for each in "qkv"]
        q, k, v = (self._empty(heads.seq_len, 1, count).permute(1, 2, 0, 3) for count in shapes)
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
        takes: Callable[..., bool] = getattr(torch.backends.cuda, f"can_use_{name}_attention")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if takes(params, True):
                return None
        return str(said[0].message).partition(" (Triggered")[0] if said else "refused by torch"

    def variable_length(self, *, windows: bool) -> VariableLength:
        """Return torch's variable-length attention, after a trial with two small documents on this device.

        Args:
            windows: it must be able to compute windows.

        Raises:
            RuntimeError, ValueError: it cannot compute these heads.
        """
        attend = variable_length(self._heads.queries != self._heads.keys)
        bounds = torch.tensor([0, 3, 8], dtype=torch.int32, device=self._device)
        q, k, v = (self._empty(8, count) for count in (self._heads.queries, self._heads.keys, self._heads.keys))
        attend(q, k, v, bounds, 5, 2 if windows else None, 0.5).sum().backward()
        return attend

    def _empty(self, *shape: int) -> Tensor:
        shape = (*shape, self._heads.channels)
        return torch.zeros(shape, dtype=self._dtype, device=self._device, requires_grad=True)


def choose_attention(probe: Probe, *, documents: bool, windows: bool, deterministic: bool) -> AttentionChoice:
    """Choose the implementation for a GPU. The caller enables it, because probing changes which are enabled.

    Args:
        probe: tries implementations on the GPU, with the run's dtype and heads.
        documents: whether attention stays inside documents.
        windows: whether blocks have windows without a soft cap.
        deterministic: whether every run must give the same bits.
    """
    attend, why = None, []
    if documents or windows:
        try:
            attend = probe.variable_length(windows=windows)
        except (RuntimeError, ValueError) as error:
            slowly = ["documents are computed length by length"] * documents + ["windows in blocks"] * windows
            why.append(f"{', '.join(slowly)}: {error}")
    names = _FUSED if probe.prefers_cudnn() and not deterministic and not documents else _FUSED[1:]
    if windows and attend is None:
        names = ("efficient",)  # flash takes no mask
    refusals = {}
    for repeats in (False, True):
        for name in names:
            refusal = probe.refusal(name, repeats=repeats)
            if refusal is None:
                return AttentionChoice(name, repeats, attend, "; ".join(why))
            refusals.setdefault(name, refusal)
    against = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    why.append(f"attention stores S^2 scores per head in memory, because no other implementation fits ({against})")
    return AttentionChoice("math", False, attend, "; ".join(why))


def settle_attention(config: Config, model: Transformer, device: torch.device, *, first: bool) -> None:
    """Make a model use the best attention of its GPU; a CPU has only one.

    Args:
        first: whether this rank prints the warning.
    """
    if device.type != "cuda":
        return
    shape, ranks = model_shape(config), config.parallel.tensor
    heads = Heads(shape.heads // ranks, max(1, shape.kv_heads // ranks), shape.head_dim, shape.seq_len)
    probe = Probe(device, DTYPES[config.precision.dtype], heads)
    documents, deterministic, capped = config.data.mask_eod, config.run.deterministic, shape.attention_cap is not None
    windows = not capped and any(shape.window_of(kind) is not None for kind in shape.kinds)
    choice = choose_attention(probe, documents=documents, windows=windows, deterministic=deterministic)
    take(choice.name)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.repeats, layer.variable_length = choice.repeats, None if capped else choice.variable_length
    varied = " and ".join(["documents"] * documents + ["windows"] * windows)
    varied = f" ({varied}: variable-length flash)" if choice.variable_length is not None and not capped else ""
    logging.getLogger("megazero").info("attention: %s%s%s", choice, varied, ", deterministic" * deterministic)
    if choice.why and first:
        warn(choice.why)


def repeat_bits(config: Config, device: torch.device) -> None:
    """Make torch use GPU operations that give the same bits in every run, if the config asks for it.

    Call it before the first product on the GPU, when cuBLAS reads the size of its workspace.
    """
    if device.type != "cuda" or not config.run.deterministic:
        return
    fix_cublas_workspace()
    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward would not be deterministic
    # Otherwise torch would fill each new tensor, an additional write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def take(name: str) -> None:
    """Enable one implementation of torch's attention, and disable the others."""
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    torch.backends.cuda.enable_flash_sdp(name == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(name == "efficient")
    torch.backends.cuda.enable_math_sdp(name == "math")


def variable_length(grouped: bool) -> VariableLength:
    """Return torch's variable-length attention, causal inside documents, called as this torch version requires.

    Args:
        grouped: several query heads share a key-value head; torch versions without this option detect it themselves.
    """
    from torch.nn.attention.varlen import varlen_attn  # it imports torch's compiler, which takes a second

    known = inspect.signature(varlen_attn).parameters
    always: dict[str, Any] = {"enable_gqa": grouped} if "enable_gqa" in known else {}

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None, scale: float
    ) -> Tensor:
        options: dict[str, Any]
        if "window_size" in known:
            options = {"window_size": (-1 if window is None else window - 1, 0), "scale": scale}
        elif window is None:  # torch 2.10, where scores have the usual scale
            options, q = {"is_causal": True}, q * (scale * q.shape[-1] ** 0.5)
        else:
            raise ValueError("windows need torch 2.11")
        y = varlen_attn(q, k, v, bounds, bounds, longest, longest, **always, **options)
        assert isinstance(y, Tensor), "nothing else was asked for"
        return y

    return attend
