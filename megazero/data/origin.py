"""Write and read the record of what token files were made of: PREFIX.json next to PREFIX.bin and PREFIX.idx.

`megazero preprocess` writes it. Token files without one (made by other tools, or by an old version) are read as well;
their tokenizer and the number of bytes of their text are then unknown.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megazero.base.errors import UserError
from megazero.base.files import write_atomically
from megazero.base.reading import read_file
from megazero.data.loss_mask import mask_path
from megazero.data.token_dataset import TokenDataset
from megazero.data.tokenizer import Tokenizer

_BYTES = 1 << 20
_ADDED = ("documents", "tokens", "text_bytes", "id_bytes")


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Origin:
    """A record of what token files were made of.

    Attributes:
        tokenizer: the fingerprint of the tokenizer.
        vocab_size: the number of ids of the tokenizer.
        documents, tokens: in the files; tokens include the end-of-document ids.
        text_bytes: UTF-8 bytes of the text that was encoded.
        id_bytes: bytes that the ids stand for (`Tokenizer.token_bytes`): text_bytes if the tokenizer is lossless.
        longest: tokens of the longest document.
        mask: the digest of the mask (`data/loss_mask.py`); None: there is none.
    """

    tokenizer: str
    vocab_size: NonNegativeInt
    documents: NonNegativeInt
    tokens: NonNegativeInt
    text_bytes: NonNegativeInt
    id_bytes: NonNegativeInt
    longest: NonNegativeInt
    mask: str | None = None

    @property
    def bytes_scale(self) -> float:
        """Bytes of text for each byte that ids stand for."""
        return self.text_bytes / self.id_bytes if self.id_bytes else 1.0

    def write(self, prefix: Path) -> None:
        """Write PREFIX.json next to token files. Raises UserError 208: it cannot be written."""
        write_atomically(path_of(prefix), (json.dumps(asdict(self), indent=1) + "\n").encode())


_RECORD = TypeAdapter(Origin)


def path_of(prefix: str | Path) -> Path:
    """Return the path of the record of a prefix, which may contain dots."""
    return Path(f"{Path(prefix)}.json")


def read_origin(prefix: str | Path) -> Origin | None:
    """Return the record of token files; None: there is no PREFIX.json. Raises UserError 203: it is damaged."""
    path = path_of(prefix)
    if not path.exists():
        return None
    try:
        return _RECORD.validate_json(read_file(path, _BYTES))
    except ValidationError as error:
        first = error.errors()[0]
        what = f"cannot be read: {' '.join(map(str, first['loc']))}: {first['msg']}"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise UserError(203, what, "remove it, or rebuild the token files", where=path)


def origin_of(files: TokenDataset, tokenizer: Tokenizer | None = None) -> Origin | None:
    """Return the record of token files after a check that it fits them and the tokenizer; None: no PREFIX.json.

    Raises:
        UserError: 203, the record is damaged, or of other files; 221, they were made by another tokenizer; 225, they
            have another mask.
    """
    origin, prefix = require_tokenizer(files.prefix, tokenizer), files.prefix
    if origin is not None and (origin.documents, origin.tokens) != (files.num_documents, files.num_tokens):
        what = f"records {origin.documents:,} documents and {origin.tokens:,} tokens, "
        what += f"{prefix}.idx has {files.num_documents:,} and {files.num_tokens:,}"
        raise UserError(203, what, f"remove {path_of(prefix).name} if it is of other files", where=path_of(prefix))
    require_mask(origin, files.mask_digest, prefix)
    return origin


def require_mask(origin: Origin | None, digest: str | None, prefix: Path) -> None:
    """Refuse token files whose mask has another digest (None: no mask) than PREFIX.json names. Raises UserError 225."""
    if origin is None or origin.mask == digest:
        return
    if digest is None:
        what = f"is missing, but {path_of(prefix).name} names it: without it every token would count"
    else:
        what = f"has xxh3 {digest}, {path_of(prefix).name} records {origin.mask or 'none'}"
    raise UserError(225, what, "copy all files of the data set again, or preprocess again", where=mask_path(prefix))


def require_tokenizer(prefix: str | Path, tokenizer: Tokenizer | None) -> Origin | None:
    """Return the record of token files after a check that no other tokenizer made them.

    Raises:
        UserError: 203, the record is damaged; 221, they were made by another tokenizer.
    """
    origin = read_origin(prefix)
    if origin is not None and tokenizer is not None and origin.tokenizer != tokenizer.fingerprint:
        what = f"was made by the tokenizer {origin.tokenizer} ({origin.vocab_size:,} ids), not by {tokenizer.path}, "
        what += f"{tokenizer.fingerprint} ({tokenizer.vocab_size:,} ids)"
        raise UserError(221, what, "set data.tokenizer to the tokenizer it was made by", where=f"{prefix}.bin")
    return origin


def joined(origins: Sequence[Origin | None], prefix: Path) -> Origin | None:
    """Return the record of the joined token files, without a mask; None: one of them has no record.

    Args:
        origins: the record of each of them.
        prefix: the prefix of the first, for the error.

    Raises:
        UserError: 217, they were made by different tokenizers.
    """
    known = [origin for origin in origins if origin is not None]
    if odd := next((origin for origin in known if origin.tokenizer != known[0].tokenizer), None):
        what = f"was made by the tokenizer {known[0].tokenizer}, another input by {odd.tokenizer}"
        raise UserError(217, what, "preprocess all with the same tokenizer", where=prefix)
    if len(known) < len(origins):
        return None
    counts = {name: sum(getattr(origin, name) for origin in known) for name in _ADDED}
    return replace(known[0], **counts, longest=max(origin.longest for origin in known), mask=None)
