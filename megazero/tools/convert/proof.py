"""Prove that a model of transformers and ours compute the same function, by their logits.

A cut of the model has each kind of block once or twice, with the real widths and weights. Both compute it in fp64, and
the largest difference must be at most 1e-12 of the largest logit. transformers computes norms, angles and softmax in
fp32 whatever the model's dtype, so its module gets a `torch` whose float32 is float64. Windows of the cut are shorter,
so that the texts are longer than them. Texts are random, and of the tokenizer if there is one; at positions from 0, up
to the longest, and around the length before an extension; and with two documents. Then the whole model is compared in
fp32, if memory allows.
"""

import contextlib
import copy
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.machine import free_memory
from megazero.comm.grid import Axis
from megazero.kernels.operations import REFERENCE
from megazero.model.batch_context import BatchContext
from megazero.model.transformer import Transformer
from megazero.plan.layers import parameters
from megazero.plan.model import Shape
from megazero.tools.convert.tensors import Link, filled

CUT, WHOLE = 1e-12, 1e-3  # of the largest logit: in fp64; in fp32, where every block sums in another order
_WINDOW, _TEXT = 6, 24  # tokens of a window of the cut, and of a text


@dataclass(frozen=True)
class Proof:
    """The result of a comparison.

    Attributes:
        worst: the largest difference of the cut in fp64, relative to the largest logit.
        layers: the blocks of the cut.
        whole: the largest difference of the whole model in fp32; None: it does not fit into memory.
        reason: why nothing was compared; empty: it was.
    """

    worst: float | None = None
    layers: tuple[int, ...] = ()
    whole: float | None = None
    reason: str = ""

    def as_json(self, family: str) -> bytes:
        """Return the content of proof.json, which also remembers the family."""
        found = {"proven": not self.reason, "dtype": "fp64", "worst": self.worst, "layers": self.layers}
        found |= {"whole_fp32": self.whole, "family": family, "reason": self.reason}
        return json.dumps(found, indent=1).encode()

    def __str__(self) -> str:
        if self.reason:
            return f"not proven: {self.reason}"
        whole = "" if self.whole is None else f", all blocks to {self.whole:.0e} in fp32"
        return f"proven: logits of blocks {', '.join(map(str, self.layers))} agree to {self.worst:.0e} in fp64{whole}"


@dataclass(frozen=True)
class Sides:
    """The two models.

    Attributes:
        folder: of transformers' config.json and weights.
        shape: of our model.
        links: returns the links of our parameters for a number of blocks.
        theirs: returns a tensor of the folder by its name.
        ours: returns one of our parameters by its name.
        text: ids of a text of the tokenizer; empty: there is none.
    """

    folder: Path
    shape: Shape
    links: Callable[[int], Sequence[Link]]
    theirs: Callable[[str], Tensor]
    ours: Callable[[str], Tensor]
    text: Sequence[int]


class Sample(NamedTuple):
    """Ids of a text, the position of the first token of its documents, and their lengths."""

    ids: Tensor
    first: int
    lengths: tuple[int, ...]


def prove(sides: Sides) -> Proof:
    """Compare a cut of both models in fp64, then all of them in fp32.

    Raises:
        UserError: 416, the models compute different functions.
    """
    try:
        return _proven(sides, importlib.import_module("transformers"))
    except ImportError:
        return Proof(reason="transformers is not installed")
    except UserError:
        raise
    except Exception as error:  # transformers raises any kind of error for a config that it cannot compute
        what = f"transformers cannot compute this model: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        raise UserError(415, what, "correct config.json, or give --no-proof", where=sides.folder) from None


def _proven(sides: Sides, transformers: Any) -> Proof:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(sides.folder, local_files_only=True)
    layers = _chosen(config, sides.shape)
    less = max(0, (getattr(config, "sliding_window", None) or 0) - _WINDOW)
    shape = _cut_shape(sides.shape, layers, less)
    if 20 * parameters(shape) > free_memory():  # in fp64 on both sides, and the files in between
        return Proof(reason="not enough memory to compute two blocks in fp64")
    with doing("comparing with transformers"), TemporaryDirectory() as name:
        cut = _cut_config(config, layers, less)
        cut.save_pretrained(name)
        _write_cut(sides, layers, Path(name))
        with widened(type(config).__module__.split(".")[-2]):
            theirs = _their_model(transformers, Path(name), cut, torch.float64)
            ours = _our_model(shape, _cut_weights(sides, layers), torch.float64)
            worst = _compared(theirs, ours, list(_samples(shape, sides.text)), layers, CUT)
    everything, whole = range(sides.shape.layers), None
    if 12 * parameters(sides.shape) < free_memory():  # both models in fp32, and room to read
        with doing("comparing all blocks with transformers"):
            theirs = _their_model(transformers, sides.folder, config, torch.float32)
            ours = _our_model(sides.shape, _cut_weights(sides, everything), torch.float32)
            whole = _compared(theirs, ours, list(_samples(sides.shape, sides.text))[:1], everything, WHOLE)
    return Proof(worst, layers, whole)


class _Wide:
    """torch with float64 in place of float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def widened(package: str) -> Iterator[None]:
    """Let a package of transformers.models compute all in fp64."""
    names = (f"transformers.models.{package}.modeling_{package}", "transformers.modeling_rope_utils")
    modules = [importlib.import_module(name) for name in names]
    narrow, default = torch.Tensor.float, torch.get_default_dtype()
    for module in modules:
        vars(module)["torch"] = _Wide()
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        for module in modules:
            vars(module)["torch"] = torch
        torch.Tensor.float = narrow  # type: ignore[method-assign]
        torch.set_default_dtype(default)


def _chosen(config: Any, shape: Shape) -> tuple[int, ...]:
    """Return the first two blocks of each kind; blocks that either side takes for another kind count as another."""
    lists = [getattr(config, name, None) or [None] * shape.layers for name in ("layer_types", "no_rope_layers")]
    found: dict[tuple, list[int]] = {}
    for i, theirs in enumerate(zip(*lists, strict=True)):
        found.setdefault((*theirs, shape.kind(i)), []).append(i)
    return tuple(sorted(i for blocks in found.values() for i in blocks[:2]))


def _cut_config(config: Any, layers: Sequence[int], less: int) -> Any:
    """Return transformers' config of some blocks, with a window that is shorter."""
    found = copy.deepcopy(config)
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(found, name, [getattr(config, name)[i] for i in layers])
    found.num_hidden_layers = len(layers)
    if less:
        found.sliding_window = config.sliding_window - less
    return found


def _cut_shape(shape: Shape, layers: Sequence[int], less: int) -> Shape:
    """Return our shape of some blocks, with windows that are shorter by as much as transformers'."""
    kinds = (shape.kind(i) for i in layers)
    cut = (replace(kind, window=kind.window and max(1, kind.window - less)) for kind in kinds)
    return replace(shape, layers=len(layers), kinds=tuple(cut), dropout=0.0)


def _cut_names(names: Sequence[str], layers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield (our name in the cut, in the whole model)."""
    for name in names:
        first, number, *rest = (*name.split("."), "")
        yield name, name if first != "blocks" else ".".join((first, str(layers[int(number)]), *rest)).rstrip(".")


def _write_cut(sides: Sides, layers: Sequence[int], folder: Path) -> None:
    """Write the tensors of some blocks as transformers reads them."""
    sources = {link.ours: link.theirs for link in sides.links(sides.shape.layers)}
    tensors = {}
    for link in sides.links(len(layers)):
        whole = sources[tuple(name for _, name in _cut_names(link.ours, layers))]
        tensors |= {name: sides.theirs(source) for name, source in zip(link.theirs, whole, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _their_model(transformers: Any, folder: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def _cut_weights(sides: Sides, layers: Sequence[int]) -> dict[str, Tensor]:
    names = [name for link in sides.links(len(layers)) for name in link.ours]
    return {name: sides.ours(source) for name, source in _cut_names(names, layers)}


def _our_model(shape: Shape, weights: dict[str, Tensor], dtype: torch.dtype) -> Transformer:
    model = Transformer(shape, seed=0, tensor=Axis("tensor"), sequence=False, ops=REFERENCE)
    return filled(model, weights.pop, dtype)


def _samples(shape: Shape, text: Sequence[int]) -> Iterator[Sample]:
    """Yield the texts to compare."""
    length = min(_TEXT, shape.seq_len)
    random = torch.randint(shape.vocab, (length,), generator=torch.Generator().manual_seed(0))
    ropes = [rope for kind in shape.kinds if (rope := shape.rope_of(kind)) and rope.original > 1]
    scaled = [shape.query_scale[1]] if shape.query_scale else []
    before = {rope.original for rope in ropes} | {*scaled}  # lengths before an extension
    firsts = {shape.seq_len - length} | {max(0, each - length // 2) for each in before if each < shape.seq_len}
    extended = any(rope.kind == "longrope" and shape.seq_len > rope.original for rope in ropes)
    for first in sorted(firsts if extended else firsts | {0}, reverse=extended):  # transformers' choice is by length
        if first + length <= shape.seq_len:
            yield Sample(random, first, (length,))
    if extended:
        return
    if text:
        yield Sample(torch.tensor(text[:length]), 0, (len(text[:length]),))
    if length > 2:
        yield Sample(random, 0, (length - length // 3, length // 3))


def _compared(
    theirs: nn.Module, ours: Transformer, samples: Sequence[Sample], layers: Sequence[int], limit: float
) -> float:
    """Return the largest difference of logits, relative to the largest. Raises UserError 416: above `limit`."""
    worst = 0.0
    with torch.no_grad():
        for sample in samples:
            pairs = zip(_our_values(ours, sample), _their_values(theirs, sample), strict=True)
            apart = [_difference(*pair) for pair in pairs]
            worst = max(worst, apart[-1])
            if not apart[-1] <= limit:
                names = ["the embedded tokens", *(f"the outputs of block {i}" for i in layers), "the logits"]
                first = next(i for i, each in enumerate(apart) if not each <= limit)
                where = f"at positions {sample.first} to {sample.first + len(sample.ids) - 1}"
                what = f"the logits {where} differ by {apart[-1]:.1e} of the largest, expected at most {limit:.0e}; "
                what += f"the first that differ are {names[first]}, by {apart[first]:.1e}"
                raise UserError(416, what, "report this model; --no-proof imports and exports it as it is")
    return worst


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _their_values(model: nn.Module, sample: Sample) -> list[Tensor]:
    """Return transformers' embedded tokens, outputs of blocks, and logits, each [S, ...]; of each document apart."""
    depth = int(model.config.num_hidden_layers)  # type: ignore[attr-defined]
    blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == depth)
    parts = []
    for ids, places in zip(sample.ids.split(sample.lengths), _places(sample), strict=True):
        run = partial(model, ids[None], position_ids=places[None], use_cache=False)
        parts.append([x[0] for x in _recorded(blocks, lambda run=run: run().logits)])
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _our_values(model: Transformer, sample: Sample) -> list[Tensor]:
    """Return our embedded tokens, outputs of blocks, and logits, each [S, ...]."""
    step = BatchContext(0, torch.zeros(1, dtype=torch.int64), training=False)
    positions_S1 = torch.cat(_places(sample))[:, None]
    if len(sample.lengths) > 1:
        step = step.within_documents(positions_S1, (sample.lengths,))
    else:
        step = replace(step, positions_SB=positions_S1)
    return [x[:, 0] for x in _recorded(model.blocks, lambda: model(sample.ids[:, None], step))]


def _places(sample: Sample) -> list[Tensor]:
    """Return the positions of the tokens of each document."""
    return [torch.arange(sample.first, sample.first + length) for length in sample.lengths]


def _recorded(blocks: nn.ModuleList, run: Callable[[], Tensor]) -> list[Tensor]:
    """Run a model; return the input of its first block, the outputs of all, and the result."""
    found: list[Tensor] = []

    def note(value: Any) -> None:
        found.append(value[0] if isinstance(value, tuple) else value)

    def before(_: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        note(given or named["hidden_states"])

    hooks = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [block.register_forward_hook(lambda _, given, value: note(value)) for block in blocks]
    try:
        note(run())
    finally:
        for hook in hooks:
            hook.remove()
    return found
