"""Faults in the options of the model: each leaves out or confuses one, on both sides of the comparison.

Only the reference (`plain_model.py`) can find these. A fault is planted if the config has its option.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from megazero.comm.grid import Axis
from megazero.kernels.activations import activation
from megazero.kernels.operations import REFERENCE
from megazero.model.attention import Attention
from megazero.model.block import Block
from megazero.model.mlp import Mlp
from megazero.model.norm import Norm
from megazero.plan.model import Rope, Shape
from megazero.tools.certify.fault import ALONE, TENSOR, Fault, Variant
from megazero.tools.certify.planted_calls import changed, instead
from megazero.tools.certify.training import Plant, Rig

Needs = Callable[[Shape], bool]
_OTHER = {"gelu": "gelu_erf", "gelu_erf": "gelu", "swiglu": "geglu", "geglu": "swiglu", "relu2": "gelu"}


def _all(kind: type[nn.Module]) -> Callable[[Rig], list[Any]]:
    """Return the function that returns all modules of a kind of the rig's model."""
    return lambda rig: [module for module in rig.built.model.modules() if isinstance(module, kind)]


def _rotaries(rig: Rig) -> list[Any]:
    return [each for each in dict.fromkeys(rig.built.model.rotaries) if each is not None]


def _joins(rig: Rig) -> list[Any]:
    ends = ("_first", "_second", "_end")
    parts = [getattr(block._after, end, None) for block in _all(Block)(rig) for end in ends]
    return [part.join for part in parts if part is not None]


def _loss(rig: Rig) -> list[Any]:
    return [rig.built.model.head.loss]


def _shift_positions(rig: Rig) -> None:
    """Give each block the rotary positions of the block after it."""
    attentions = _all(Attention)(rig)
    rotaries = [each.rotary for each in attentions]
    for attention, rotary in zip(attentions, [*rotaries[1:], rotaries[0]], strict=True):
        attention.rotary = rotary


def _swap_norms(rig: Rig) -> None:
    for block in _all(Block)(rig):
        block._before._norm, block._after._norm = block._after._norm, block._before._norm


def _forget_offset(rig: Rig) -> None:
    for norm in _all(Norm)(rig):
        norm._offset, norm._numbers = (), norm._numbers[:1]


def _with(name: str) -> Plant:
    """Return the fault that computes another activation."""

    def plant(rig: Rig) -> None:
        for mlp in _all(Mlp)(rig):
            mlp._activation, mlp._activation_backward = activation(REFERENCE, name)

    return plant


def _kinds(shape: Shape) -> set[Rope | None]:
    return {shape.rope_of(kind) for kind in shape.kinds}


def _ropes(shape: Shape, **plain: object) -> bool:
    """Return whether rotary positions of some block differ from these plain values."""
    return any(rope and getattr(rope, name) != value for rope in _kinds(shape) for name, value in plain.items())


def _norms_and_turns(shape: Shape) -> bool:
    return shape.qk_norm != "none" and _kinds(shape) != {None}


_blocked = partial(changed, _all(Attention), "blocked")
_rope = partial(changed, _rotaries, "rope")
_UNSCALED_TOKENS, _UNSCALED_BRANCHES, _UNSCALED_LOGITS = (
    changed(parts, "_scale", lambda _: 1.0) for parts in (lambda rig: [rig.built.model.embedding], _joins, _loss)
)
_WIDER = _blocked(lambda it: it and replace(it, window=it.window and it.window + 1))
_UNCAPPED = _blocked(lambda it: it and replace(it, cap=None))
_PLAIN = _rope(lambda rope: replace(rope, kind="plain", attention_factor=None))
_ALL_TURN = _rope(lambda rope: replace(rope, share=1.0))
_OTHER_MOMENT = changed(_all(Attention), "_norms_first", lambda first: not first)
_OTHER_SCALE = changed(_all(Attention), "scale", lambda scale: 1.1 * scale)
_UNSCALED_QUERIES = changed(_all(Attention), "_query_scale", lambda _: None)
_NO_CAP = changed(_loss, "_cap", lambda _: 1e9)
_NO_Z = changed(lambda rig: [rig.built.model.head], "_z_loss", lambda _: 0.0)
_OWN_HEADS = changed(
    lambda rig: [each._split_norms for each in _all(Attention)(rig)], "_axis", lambda _: Axis("tensor")
)
_LOST_HEADS = instead(_all(Attention), "projection.back", lambda it, back, tape, grad: back(tape, grad * it._axis.rank))


def _fault(name: str, what: str, plant: Plant, needs: Needs, layout: Variant = ALONE, small: bool = False) -> Fault:
    return Fault(name, f"{what}, on both sides", layout, plant, needs=lambda job: needs(job.shape), small=small)


OPTION_FAULTS = (
    _fault("wider-window", "a window has one token too many", _WIDER, lambda it: any(map(it.window_of, it.kinds))),
    _fault(
        "other-positions", "blocks have the positions of the next", _shift_positions, lambda it: len(_kinds(it)) > 1
    ),
    _fault("plain-angles", "angles are those of short texts", _PLAIN, lambda it: _ropes(it, kind="plain")),
    _fault("all-turn", "all pairs of channels turn", _ALL_TURN, lambda it: _ropes(it, share=1.0)),
    _fault("other-moment", "queries are normed on the other side of rotation", _OTHER_MOMENT, _norms_and_turns),
    _fault("no-offset", "weights of norms lack their offset", _forget_offset, lambda it: it.norm_offset != 0),
    _fault("swapped-norms", "a block's two norms are swapped", _swap_norms, lambda it: it.residual == "parallel"),
    _fault("unscaled-branches", "branches lack their scale", _UNSCALED_BRANCHES, lambda it: it.residual_scale != 1),
    _fault("unscaled-tokens", "tokens lack their scale", _UNSCALED_TOKENS, lambda it: it.embedding_scale != 1),
    _fault("unscaled-logits", "logits lack their scale", _UNSCALED_LOGITS, lambda it: it.logit_scale != 1),
    _fault("uncapped-logits", "logits lack their cap", _NO_CAP, lambda it: it.logit_cap is not None),
    _fault("uncapped-scores", "scores lack their cap", _UNCAPPED, lambda it: it.attention_cap is not None),
    _fault("other-scale", "scores have another scale", _OTHER_SCALE, lambda it: it.attention_scale is not None),
    _fault("unscaled-queries", "queries lack their scale", _UNSCALED_QUERIES, lambda it: it.query_scale is not None),
    _fault("no-z-loss", "the loss lacks the term of log Z", _NO_Z, lambda it: it.z_loss != 0),
    *(
        _fault(
            *(f"not-{name}", f"it is {other}", _with(other), lambda it, name=name: it.activation == name),
            small="erf" in name + other,
        )
        for name, other in _OTHER.items()
    ),
    _fault("own-heads", "norms see a rank's own heads", _OWN_HEADS, lambda it: it.qk_norm == "full", TENSOR),
    _fault("lost-heads", "one rank's gradient of its heads is lost", _LOST_HEADS, lambda it: it.kv_heads == 1, TENSOR),
)
