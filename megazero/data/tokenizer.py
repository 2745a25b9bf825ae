"""Turn text into ids and back, without losing a byte.

It wraps a SentencePiece model. Such a model writes a space as U+2581 inside its pieces and falls back to 256 byte
pieces for characters it has no piece for; with identity normalisation, no dummy prefix and all white space kept,
decode(encode(text)) == text for every text but one kind: text that itself contains U+2581 comes back with a space. That
character is therefore spelt in its three UTF-8 bytes here, which SentencePiece decodes faithfully.

Models made otherwise (a dummy prefix, collapsed spaces, no byte pieces) are refused when opened: with them, bits per
byte would be measured on another text than the one given.
"""

from pathlib import Path

import numpy as np
import sentencepiece
import xxhash

from megazero.base.errors import UserError
from megazero.base.reading import looked_up, read_file

_MODEL_BYTES = 64 << 20
SPACE_MARK = "\u2581"  # SentencePiece's picture of a space inside pieces
_PROBE = "  a\r\n\tB  \u2581 \u00e9\u4e2d\U0001f600\x00 "  # everything that a lossy model is known to change


class Tokenizer:
    """A SentencePiece model file.

    Attributes:
        path: the model file.
        vocab_size: number of ids.
        eod: the id that ends a document (</s>).
        bos: the id that begins a text (<s>); eod in a model without one.
        fingerprint: xxh3-64 of the model file, 16 hex digits; equal fingerprints mean equal ids.

    Raises:
        UserError: 209 no such file or not a model, 210 a model that changes text.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        make = "run `make data`" if "data/quickstart" in self.path.as_posix() else "run data_tools/train_tokenizer.py"
        try:
            content = read_file(self.path, _MODEL_BYTES)
        except OSError as error:
            raise UserError(209, f"no tokenizer: {error.strerror}{looked_up(path)}", make, where=path) from error
        try:
            if not content:  # accepted by the library, which then answers everything with errors
                raise RuntimeError("an empty file")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size: int = self._model.vocab_size()
            self.eod: int = self._model.eos_id()
            self.bos: int = self._model.bos_id() if self._model.bos_id() >= 0 else self.eod
            self._mark_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
            self._sizes = np.array([self._piece_bytes(i) for i in range(self.vocab_size)], np.int64)
            lossless = self.decode(self.encode(_PROBE)) == _PROBE
        except (RuntimeError, ValueError, IndexError) as error:  # also words of the library's that are no UTF-8
            raise UserError(209, "expected a SentencePiece model, cannot parse it", make, where=path) from error
        self.fingerprint = xxhash.xxh3_64_hexdigest(content)
        byte_pieces = sum(self._model.is_byte(i) for i in range(self.vocab_size))
        if byte_pieces != 256 or self.eod < 0:
            what = f"expected 256 byte pieces and a </s>, got {byte_pieces} and id {self.eod}"
            raise UserError(210, what, make, where=path)
        if not lossless:
            what = "does not give back the text it encodes (dummy prefix, normalisation or removed spaces)"
            raise UserError(210, what, make, where=path)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without end-of-document. Raises UserError 212: half a surrogate pair, no text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"character {error.start:,} of a text is half a surrogate pair, not a character"
            raise UserError(212, what, "give text that UTF-8 can hold") from error
        first, *others = text.split(SPACE_MARK)
        ids = self._model.encode(first)
        for part in others:
            ids += self._mark_ids
            ids += self._model.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without control ids (end of document); bytes that are not UTF-8 come as U+FFFD."""
        return self._model.decode(ids)

    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 bytes of text that each id stands for, int64 [vocab_size]; 0 for control ids.

        token_bytes()[encode(text)].sum() == len(text.encode()), so the mean loss of a text in bits per byte is
        sum(loss in nats) / ln 2 / sum(token_bytes of its targets).
        """
        return self._sizes

    def _piece_bytes(self, i: int) -> int:
        if self._model.is_control(i) or self._model.is_unknown(i):
            return 0
        if self._model.is_byte(i):
            return 1
        return len(self._model.id_to_piece(i).replace(SPACE_MARK, " ").encode())


def open_tokenizer(path: str | Path, vocab: int) -> Tokenizer:
    """Open the tokenizer of a model of `vocab` ids.

    Raises:
        UserError: 112, it has more pieces than that; 209, it cannot be read.
    """
    tokenizer = Tokenizer(path)
    if tokenizer.vocab_size > vocab:
        what = f"the tokenizer has {tokenizer.vocab_size} pieces, model.vocab is {vocab}"
        raise UserError(112, what, "raise model.vocab or give the model's tokenizer", where=path)
    return tokenizer
