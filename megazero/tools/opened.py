"""Open a trained model to compute with it: a run, one of its checkpoints, or a folder of transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.builders.assemble import DTYPES, build_model
from megazero.builders.job import changed
from megazero.checkpoint.manifest import FILE_NAME, Manifest, read_manifest
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_whole, read_weights, require_shapes, with_averages
from megazero.comm.grid import Axis
from megazero.config.file import load as load_config
from megazero.config.flat import flatten
from megazero.config.rules import broken_rules
from megazero.config.schema import Config
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from megazero.generation.decode import Decoder
from megazero.generation.sampling import Sampling
from megazero.generation.text import Prompt, Writer
from megazero.kernels.select import choose
from megazero.model.batch_context import BatchContext
from megazero.model.parameter import whole_shapes
from megazero.model.transformer import Transformer
from megazero.observe.sinks import warn
from megazero.run.folder import RunFolder
from megazero.tools.convert.tensors import filled
from megazero.tools.convert.transformers_files import Described


@dataclass(frozen=True)
class Opened:
    """A trained model in one process.

    Attributes:
        config: the run's config, or one made from config.json.
        tokenizer: its tokenizer; None: the config names none.
        model: the model, with its weights.
    """

    config: Config
    tokenizer: Tokenizer | None
    model: Transformer

    def logits(self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Return next-token logits for ids [S] or [B, S]: [S, V] or [B, S, V].

        Raises:
            UserError: 112, no ids, ids that are not in the vocabulary, or more than learned positions.
        """
        tokens = torch.as_tensor(ids)
        tokens_BS = tokens if tokens.dim() == 2 else tokens[None]
        if tokens.dim() not in (1, 2) or not tokens.numel() or tokens.is_floating_point():
            raise UserError(112, f"expected ids [S] or [B, S], got {tokens.dtype} {tuple(tokens.shape)}", "give ids")
        for row in tokens_BS.tolist():
            Decoder(self.model).check(row, self.config.model.vocab, new=0, where="")
        step = BatchContext(0, torch.zeros(len(tokens_BS), dtype=torch.int64), training=False)
        with torch.no_grad():
            logits_BSV = self.model(tokens_BS.T, step).transpose(0, 1)
        return logits_BSV if tokens.dim() == 2 else logits_BSV[0]

    def generate(
        self,
        prompts: Prompt | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Tensor,
        *,
        stop: Sequence[str] = (),
        chat: bool = False,
        batch: int = 8,
        **sampling: Any,
    ) -> Any:
        """Continue a text, a list of texts, or ids [S] or lists of ids; return texts, or the new ids.

        Args:
            prompts: with `chat` also the messages of a conversation, or a list of them.
            stop: a text ends before the first of these; not for ids.
            chat: render prompts with the tokenizer's chat template, and return the answers alone.
            sampling: `tokens`, `temperature`, `top_k`, `top_p`, `repetition`, `seed` (`generation/sampling.py`).

        Raises:
            UserError: 113, a text for a model without a tokenizer; those of `Sampling` and of `Writer`.
        """
        prompts = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        how, decoder, first = Sampling(**sampling), Decoder(self.model), prompts[0] if len(prompts) else ""
        single = isinstance(prompts, str) or isinstance(first, int | Mapping)
        some: Any = [prompts] if single else prompts
        if isinstance(first, int) or not (chat or isinstance(first, str | Mapping)):
            stops, vocab = set() if self.tokenizer is None else {self.tokenizer.eod}, self.config.model.vocab
            for ids in some:
                decoder.check(ids, vocab)
            found: Any = decoder.continued(some, how, vocab=vocab, stops=stops)
        elif self.tokenizer is None:
            raise UserError(113, "the model has no tokenizer", "give ids", where="generate")
        else:
            found = list(Writer(decoder, self.tokenizer, how, stop, chat, batch).texts(some))
        return found[0] if single else found


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    *,
    average: bool = False,
    tensor: Axis | None = None,
    device: torch.device | None = None,
) -> Opened:
    """Open the newest checkpoint of a run, one checkpoint (step_N), or an exported or published folder.

    Args:
        dtype: of the weights; None: the run's `precision.dtype`, fp32 for a folder of transformers.
        average: take the averages of a run's weights (`optimizer.average`).
        tensor: the axis that splits matrices; None: they are whole.
        device: of the weights; None: the CPU.

    Raises:
        UserError: 112, a tokenizer larger than the model's vocabulary; 113, the path is none of these; 162, 209, 210,
            as `open_tokenizer`; 221, the tokenizer differs from that of training; 402, there are no weights, or no
            averages; 404, they are another model's; 410, they are damaged; 414 and 415, as an import; 106, the axis
            cannot split the model.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        described, dtype = Described(path, warn), dtype or torch.float32
        read = ((link.ours, described.theirs.read(link)) for link in described.theirs.links)
        weights = {name: x for names, values in read for name, x in zip(names, values, strict=True)}
        model = _model(described.config, tensor, device, dtype)
        return Opened(described.config, described.tokenizer, filled(model, weights.pop, dtype, device))
    step = (path / FILE_NAME).is_file()
    folder = RunFolder(path.parent.parent if step else path)
    folder.require_run()
    config = load_config(str(folder.config))
    dtype, named = dtype or DTYPES[config.precision.dtype], config.data.tokenizer
    shapes = whole_shapes(build_model(config))
    tokenizer = None if named is None else open_tokenizer(named, config.model.vocab)

    def opened(of_step: Path) -> tuple[Manifest, Transformer]:
        manifest, model = read_manifest(of_step), _model(config, tensor, device, dtype)
        require_shapes(manifest, shapes, of_step)
        manifest = with_averages(manifest, of_step) if average else manifest
        if model.tensor.size == 1:
            take = read_weights(of_step, manifest, manifest.tensors).pop
        else:  # one at a time: no rank has memory for all
            take = lambda name: read_weights(of_step, manifest, [name])[name]  # noqa: E731
        return manifest, filled(model, take, dtype, device)

    manifest, model = opened(path) if step else newest_whole(Store(folder.checkpoints), opened, warn)
    trained_with = manifest.identity.get("tokenizer")
    if tokenizer is not None and trained_with not in (None, tokenizer.fingerprint):
        what = f"the model was trained with tokenizer {trained_with}, {tokenizer.path} is {tokenizer.fingerprint}"
        raise UserError(221, what, "use the training's tokenizer", where=folder.config)
    return Opened(config, tokenizer, model)


def _model(config: Config, tensor: Axis | None, device: torch.device | None, dtype: torch.dtype) -> Transformer:
    """Return the model without memory. Raises UserError 106: the axis cannot split it."""
    if tensor is not None and tensor.size > 1:
        config = changed(config, {"parallel.tensor": tensor.size, "parallel.sequence": False})
        require_rules(config, "--nproc")
    return build_model(config, choose("auto", device or torch.device("cpu"), dtype), tensor)


def require_rules(config: Config, where: str) -> None:
    """Refuse a config that breaks a rule between its options. Raises UserError 106, 107."""
    values = flatten(config)
    if broken := next(iter(broken_rules(values)), None):
        raise UserError(broken.code, broken.broken(values), broken.do, where=where)
