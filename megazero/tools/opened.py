"""Open a trained model to compute with it: a run, one of its checkpoints, or a folder of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.builders.assemble import DTYPES, build_model
from megazero.checkpoint.manifest import FILE_NAME, read_manifest
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_weights, read_weights, require_shapes, with_averages
from megazero.config.file import load as load_config
from megazero.config.schema import Config
from megazero.data.tokenizer import Tokenizer, open_tokenizer
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
            UserError: 112, an id that is not in the vocabulary, or no ids; 106, learned positions that are too few.
        """
        tokens = torch.as_tensor(ids)
        tokens_BS = tokens if tokens.dim() == 2 else tokens[None]
        m = self.config.model
        if tokens.dim() not in (1, 2) or not tokens.numel() or tokens.is_floating_point():
            raise UserError(112, f"expected ids [S] or [B, S], got {tokens.dtype} {tuple(tokens.shape)}", "give ids")
        if int(tokens.min()) < 0 or int(tokens.max()) >= m.vocab:
            raise UserError(112, f"ids from {tokens.min()} to {tokens.max()}, the vocabulary has {m.vocab}", "give ids")
        if m.position == "learned" and tokens_BS.shape[1] > m.seq_len:
            raise UserError(106, f"{tokens_BS.shape[1]} ids, the model has {m.seq_len} positions", "give fewer ids")
        step = BatchContext(0, torch.zeros(len(tokens_BS), dtype=torch.int64), training=False)
        with torch.no_grad():
            logits_BSV = self.model(tokens_BS.T, step).transpose(0, 1)
        return logits_BSV if tokens.dim() == 2 else logits_BSV[0]


def load(path: str | Path, dtype: torch.dtype | None = None, *, average: bool = False) -> Opened:
    """Open the newest checkpoint of a run, one checkpoint (step_N), or an exported or published folder.

    Args:
        dtype: of the weights; None: the run's `precision.dtype`, fp32 for a folder of transformers.
        average: take the averages of a run's weights (`optimizer.average`).

    Raises:
        UserError: 112, a tokenizer larger than the model's vocabulary; 113, the path is none of these; 162, 209, 210,
            as `open_tokenizer`; 221, the tokenizer differs from that of training; 402, there are no weights, or no
            averages; 404, they are another model's; 410, they are damaged; 414 and 415, as an import.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        described, dtype = Described(path, warn), dtype or torch.float32
        read = ((link.ours, described.theirs.read(link)) for link in described.theirs.links)
        weights = {name: x for names, values in read for name, x in zip(names, values, strict=True)}
        return Opened(described.config, described.tokenizer, filled(build_model(described.config), weights, dtype))
    step = (path / FILE_NAME).is_file()
    folder = RunFolder(path.parent.parent if step else path)
    folder.require_run()
    config = load_config(str(folder.config))
    named, model = config.data.tokenizer, build_model(config)
    shapes = whole_shapes(model)
    tokenizer = None if named is None else open_tokenizer(named, config.model.vocab)
    if step:
        manifest = read_manifest(path) if not average else with_averages(read_manifest(path), path)
        require_shapes(manifest, shapes, path)
        weights = read_weights(path, manifest, manifest.tensors)
    else:
        manifest, weights = newest_weights(Store(folder.checkpoints), shapes, warn, average=average)
    trained_with = manifest.identity.get("tokenizer")
    if tokenizer is not None and trained_with not in (None, tokenizer.fingerprint):
        what = f"the model was trained with tokenizer {trained_with}, {tokenizer.path} is {tokenizer.fingerprint}"
        raise UserError(221, what, "use the training's tokenizer", where=folder.config)
    return Opened(config, tokenizer, filled(model, weights, dtype or DTYPES[config.precision.dtype]))
