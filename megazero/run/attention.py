"""Choose how attention is computed on a GPU, and say it.

torch has four implementations of causal attention and takes the first that fits by an order of its own, without a word.
One of them, plain products (math), builds the scores, S^2 numbers for each head: 4 GB a sample and layer of 32 heads at
8,192 tokens in 16 bits. Here one is chosen before the first step, the only one that torch may take then:

    cudnn       on Hopper and data-centre Blackwell from cuDNN 9.15.1 on, before which some lengths gave wrong numbers;
                not with `run.deterministic`, and not for documents of many lengths, each of which it would plan again
    flash       16 bits, compute capability 8.0 and later
    efficient   also fp32, and older GPUs
    math        whatever is left, with a warning

Documents (`data.mask_eod`) take torch's variable-length flash attention where it computes; else those of one length at
a time. On a CPU there is one implementation, and it always gives the same bits.

Measured on one H100 with torch 2.11 (docs/gpu_h100.md). The order was read in torch's sources (2.10 to 2.13); tests put
other answers in torch's place.
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
from megazero.config.schema import Config
from megazero.launcher.environment import fix_cublas_workspace
from megazero.model.attention import Attention, VariableLength
from megazero.model.transformer import Transformer
from megazero.observe.sinks import warn

_CUDNN = 91501
_FUSED = ("cudnn", "flash", "efficient")


@dataclass(frozen=True)
class Heads:
    """The heads of one rank: query heads, key-value heads, channels of each, and the tokens that they see."""

    queries: int
    keys: int
    channels: int
    seq_len: int


@dataclass(frozen=True)
class AttentionChoice:
    """The way attention is computed.

    Attributes:
        name: cudnn, flash, efficient or math.
        repeats: keys and values are repeated for each query head.
        variable_length: for documents; None: those of one length at a time.
        why: what is to be warned of; "" where nothing is.
    """

    name: str
    repeats: bool
    variable_length: VariableLength | None
    why: str

    def __str__(self) -> str:
        return self.name + " with repeated keys" * self.repeats


class Probe:
    """The answers of torch and of a GPU that a choice depends on.

    Args:
        device: a GPU.
        dtype: of activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: Heads):
        self._device, self._dtype, self._heads = device, dtype, heads

    def prefers_cudnn(self) -> bool:
        """Return whether cuDNN's attention is the fastest here, and sound."""
        version = torch.backends.cudnn.version() or 0
        return torch.cuda.get_device_capability(self._device) in ((9, 0), (10, 0)) and version >= _CUDNN

    def refusal(self, name: str, *, repeats: bool) -> str | None:
        """Return why torch does not take an implementation for these heads; None: it does."""
        heads = self._heads
        take(name)  # torch answers for what is enabled alone
        shapes = [(heads.queries if each == "q" or repeats else heads.keys) for each in "qkv"]
        q, k, v = (self._empty(heads.seq_len, 1, count).permute(1, 2, 0, 3) for count in shapes)
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
        takes: Callable[..., bool] = getattr(torch.backends.cuda, f"can_use_{name}_attention")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if takes(params, True):
                return None
        return str(said[0].message).partition(" (Triggered")[0] if said else "refused by torch"

    def variable_length(self) -> VariableLength:
        """Return torch's attention for documents of several lengths, once it has computed two small ones here.

        Raises:
            RuntimeError, ValueError: it does not compute these heads.
        """
        attend = variable_length(self._heads.queries != self._heads.keys)
        bounds = torch.tensor([0, 3, 8], dtype=torch.int32, device=self._device)
        q, k, v = (self._empty(8, count) for count in (self._heads.queries, self._heads.keys, self._heads.keys))
        attend(q, k, v, bounds, 5).sum().backward()
        return attend

    def _empty(self, *shape: int) -> Tensor:
        shape = (*shape, self._heads.channels)
        return torch.zeros(shape, dtype=self._dtype, device=self._device, requires_grad=True)


def choose_attention(probe: Probe, *, documents: bool, deterministic: bool) -> AttentionChoice:
    """Return the choice for a GPU.

    Args:
        documents: attention stays inside documents.
        deterministic: every run gives the same bits.
    """
    attend, why = None, []
    if documents:
        try:
            attend = probe.variable_length()
        except (RuntimeError, ValueError) as error:
            why.append(f"documents are computed length by length: {error}")
    names = _FUSED if probe.prefers_cudnn() and not deterministic and not documents else _FUSED[1:]
    refusals = {}
    for repeats in (False, True):
        for name in names:
            refusal = probe.refusal(name, repeats=repeats)
            if refusal is None:
                return AttentionChoice(name, repeats, attend, "; ".join(why))
            refusals.setdefault(name, refusal)
    against = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    why.append(f"attention builds its scores in memory, S^2 numbers a head, for nothing else fits ({against})")
    return AttentionChoice("math", False, attend, "; ".join(why))


def settle_attention(config: Config, model: Transformer, device: torch.device, *, first: bool) -> None:
    """Let a model compute attention in the best way that its device has; a CPU has one.

    Args:
        first: this rank warns.
    """
    if device.type != "cuda":
        return
    m, ranks = config.model, config.parallel.tensor
    assert m.kv_heads is not None, "a resolved config"
    heads = Heads(m.heads // ranks, m.kv_heads // ranks, m.hidden // m.heads, m.seq_len)
    probe = Probe(device, DTYPES[config.precision.dtype], heads)
    deterministic = config.run.deterministic
    choice = choose_attention(probe, documents=config.data.mask_eod, deterministic=deterministic)
    take(choice.name)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.repeats, layer.variable_length = choice.repeats, choice.variable_length
    documents = " (documents: variable-length flash)" if choice.variable_length is not None else ""
    logging.getLogger("megazero").info("attention: %s%s%s", choice, documents, ", deterministic" * deterministic)
    if choice.why and first:
        warn(choice.why)


def repeat_bits(config: Config, device: torch.device) -> None:
    """Let torch take the operations on a GPU that give the same bits in every run, if it is asked for.

    Called before the first product there, which is when its library reads how much memory it may use.
    """
    if device.type != "cuda" or not config.run.deterministic:
        return
    fix_cublas_workspace()
    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward would not be
    # Without this torch would write each new tensor once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def take(name: str) -> None:
    """Let torch's attention take one implementation and no other."""
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    torch.backends.cuda.enable_flash_sdp(name == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(name == "efficient")
    torch.backends.cuda.enable_math_sdp(name == "math")


def variable_length(grouped: bool) -> VariableLength:
    """Return torch's variable-length attention, causal inside documents, as this version calls it.

    Args:
        grouped: several query heads share a key-value head; versions without the option see it themselves.
    """
    from torch.nn.attention.varlen import varlen_attn  # it imports torch's compiler, which takes a second

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": grouped} if "enable_gqa" in known else {}
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}  # the latter in 2.10 alone

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        y = varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)
        assert isinstance(y, Tensor), "nothing else was asked for"
        return y

    return attend
