"""Time the kernels of every family at the sizes of a config on this device: `megazero doctor --kernels --config X`.

A rank's sizes: its micro-batch, and its part of heads, channels and vocabulary. Only operations that the config uses
are timed. All implementations of a family take turns on the same random tensors. A line has the time of each, the one
that `precision.kernels=auto` takes, and a faster one if there is one.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from megazero.base.errors import UserError
from megazero.builders.assemble import DTYPES
from megazero.builders.pipeline import model_shape
from megazero.config.schema import Config
from megazero.kernels.operations import Operations
from megazero.kernels.samples import SAMPLES, Draw, Sizes
from megazero.kernels.select import FAMILIES, choose
from megazero.kernels.timing import medians
from megazero.plan.layers import block_parameters
from megazero.tools.doctor.finding import Finding, duration

_LOGITS = 1 << 26  # most logits of a call: the time of larger ones is proportional
_FASTER = 1.05  # a smaller advantage is noise


def kernels(config: Config, device: torch.device) -> Iterator[Finding]:
    """Yield the times of each family of operations in the dtype of a config that has a micro-batch."""
    dtype, implementations = DTYPES[config.precision.dtype], dict[str, Operations]()
    for name in ("fused", "apex", "compile", "reference"):
        try:
            implementations[name] = choose(name, device, dtype)
        except UserError as error:
            yield Finding(name, error.what, "absent")
    auto, sizes = choose("auto", device, dtype), sizes_of(config)
    unused = _unused(config)
    for family, operations in FAMILIES.items():
        times, used = dict[str, float](), [name for name in operations if not any(word in name for word in unused)]
        for name in used:
            draw = Draw(dtype, torch.Generator(device).manual_seed(0))
            for implementation, seconds in _times(name, implementations, sizes, draw):
                times[implementation] = times.get(implementation, 0.0) + seconds
        if used:
            yield _finding(family, times, _taken(auto, used[0], implementations))


def sizes_of(config: Config) -> Sizes:
    """Return a rank's sizes."""
    shape, tensor = model_shape(config), config.parallel.tensor
    return Sizes(
        sequence=shape.seq_len,
        batch=config.batch.rows,
        hidden=shape.hidden,
        ffn=shape.ffn // tensor,
        vocab=-(-shape.vocab // tensor),
        heads=shape.heads // tensor,
        head_dim=shape.head_dim,
        flat=block_parameters(shape, shape.kinds[0]) // tensor,
    )


def _unused(config: Config) -> list[str]:
    """Return parts of the names of operations that a config does not use."""
    model, precision, zero = config.model, config.precision, config.zero
    words = {
        "layer_norm": model.norm != "layernorm",
        "rms_norm": model.norm != "rmsnorm" and model.qk_norm == "none",
        "gelu": model.activation != "gelu",
        "swiglu": model.activation != "swiglu",
        "rotary": model.position != "rotary",
        "dropout": model.dropout == 0,
        "quantize": zero.quantize.parameters == zero.quantize.gradients == "none",
        "adamw": precision.dtype not in ("bf16", "fp16"),
    }
    return [word for word, unused in words.items() if unused]


def _times(name: str, implementations: dict[str, Operations], sizes: Sizes, draw: Draw) -> Iterator[tuple[str, float]]:
    """Yield the seconds of an operation by each implementation that has it and runs."""
    if name.startswith("cross_entropy"):
        sizes = replace(sizes, sequence=min(sizes.sequence * sizes.batch, max(_LOGITS // sizes.vocab, 1)), batch=1)
    arguments = SAMPLES[name](draw, sizes)
    calls = {each: getattr(ops, name) for each, ops in implementations.items() if getattr(ops, name) is not None}
    own = {each: call for each, call in calls.items() if each == "reference" or call is not calls.get("reference")}
    found = medians([partial(call, *arguments) for call in own.values()], draw.device)
    yield from ((each, seconds) for each, seconds in zip(own, found, strict=True) if isinstance(seconds, float))


def _finding(family: str, times: dict[str, float], taken: str) -> Finding:
    text = ", ".join(f"{name} {duration(seconds)}" for name, seconds in sorted(times.items(), key=lambda each: each[1]))
    fastest = min(times, key=lambda name: times[name], default=taken)
    text += f"; auto takes {taken}"
    if taken in times and times[taken] > _FASTER * times[fastest]:
        text += f", {fastest} is {times[taken] / times[fastest]:.2f} times as fast"
    return Finding(family, text, values=times)


def _taken(auto: Operations, name: str, implementations: dict[str, Operations]) -> str:
    """Return the implementation that `auto` takes for an operation."""
    call = getattr(auto, name)
    found = [each for each, ops in implementations.items() if getattr(ops, name) is call]
    return found[-1] if found else "reference"  # the last: others hold its functions where they lack one
