"""Read SentencePiece models.

Such a model writes a space as U+2581 inside its pieces and falls back to 256 byte pieces for characters without a
piece. With identity normalisation, no dummy prefix and all white space kept, decode(encode(text)) == text, except that
a U+2581 in the text becomes a space. So this character is encoded as its three UTF-8 bytes here, which SentencePiece
decodes correctly. Models with other settings (Llama 2's has a dummy prefix) are lossy.

If no piece of a lossless BPE model spans the beginning of a word, the model encodes each word once, and a cache keeps
its ids. Merges are made in the order of their scores, and at equal scores of their places. None joins two words, so the
merges of a word do not depend on the text around it: the ids of a text are those of its words, end to end. Shorter
words recur more often: if the pieces allow it, a word is letters and digits, or signs ("self", ".", "name").
"""

import re
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sentencepiece
import xxhash
from sentencepiece import sentencepiece_model_pb2

from megazero.base.errors import UserError
from megazero.data.tokenizers.common import SPACE_MARK, Tokenizer, how_to_make

ModelProto = sentencepiece_model_pb2.ModelProto  # pyright: ignore[reportAttributeAccessIssue] - made at import

# How a text is divided into words, shortest words first: spaces belong to the word after them; line ends and tabs are
# words of their own.
_WORDS = (
    re.compile(r" *+(?:[^\W_]++|(?:_|[^\w \n\t])++)| ++|[\n\t]"),  # letters and digits, or signs
    re.compile(r" *+[^ \n\t]++| ++|[\n\t]"),  # both together
)
_MOST, _MOST_CHARACTERS = 1 << 18, 64  # words in the cache, and their length: some 40 MB for English
BPE, CHAR = 2, 4  # ModelProto.trainer_spec.model_type
USER_DEFINED = 4  # ModelProto.SentencePiece.type


class SentencePiece(Tokenizer):
    """A SentencePiece model file.

    Raises:
        UserError: 209 no such file or not a model, 210 a model without </s>.
    """

    def __init__(self, path: str | Path):
        self._open(path, self._read, "expected a SentencePiece model, cannot parse it", how_to_make(Path(path)), None)

    def _read(self, content: bytes) -> None:
        if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", content[:200]):  # as Llama 3's tokenizer.model
            what = "expected a SentencePiece model, got byte pairs with their ranks"
            raise UserError(209, what, "rename it to NAME.tiktoken", where=self.path)
        self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        self._bytes_of_mark: list[int] | None = None
        self._ids: Callable[[str], list[int]] = self._model.encode
        self.vocab_size = self._model.vocab_size()
        self._require_size()
        self.eod = self._model.eos_id()
        if self.eod < 0:
            what = f"expected a </s> token, which ends a document, got id {self.eod}"
            raise UserError(210, what, how_to_make(self.path), where=self.path)
        self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else self.eod
        self._sizes = np.array([self._piece_bytes(i) for i in range(self.vocab_size)], np.int64)
        bytes_of_mark = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        if all(self._model.is_byte(i) for i in bytes_of_mark):
            self._bytes_of_mark = bytes_of_mark
        described = ModelProto.FromString(content)
        self.lossless = self._gives_back() and not described.normalizer_spec.precompiled_charsmap
        if not self.lossless:
            self._bytes_of_mark = None  # each part of the text would get a prefix of its own
        elif described.trainer_spec.model_type == BPE and (words := self._remembered()) is not None:
            self._ids = words.ids_of
            self.cuts_after_newline = True  # a newline is a word
        self.fingerprint = xxhash.xxh3_64_hexdigest(content)
        controls = (i for i in range(self.vocab_size) if self._model.is_control(i))
        self.specials = {self._model.id_to_piece(i): i for i in {self.bos, self.eod, *controls}}
        self.files = {"tokenizer.model": content}

    def _encode(self, text: str) -> list[int]:
        if self._bytes_of_mark is None:
            return self._ids(text)
        ids, *others = map(self._ids, text.split(SPACE_MARK))
        for part in others:
            ids += self._bytes_of_mark + part
        return ids

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def _remembered(self) -> "_Remembered | None":
        """Return a cache of the ids of words; None if a piece spans the beginning of a word."""
        if any(self._model.is_unused(i) for i in range(self.vocab_size)):  # such a piece is split again after merging
            return None
        ids = [i for i in range(self.vocab_size) if self._sizes[i] > 1]
        pieces = [self._model.id_to_piece(i).replace(SPACE_MARK, " ") for i in ids]
        found = (word for word in _WORDS if all(word.fullmatch(piece) for piece in pieces))
        return next((_Remembered(self._model, word) for word in found), None)

    def _piece_bytes(self, i: int) -> int:
        if self._model.is_control(i) or self._model.is_unknown(i):
            return 0
        return 1 if self._model.is_byte(i) else len(self._model.id_to_piece(i).replace(SPACE_MARK, " ").encode())


class _Remembered(dict[str, bytes]):
    """A cache of the int32 ids of words; it keeps the first words it meets, except very long ones."""

    def __init__(self, model: sentencepiece.SentencePieceProcessor, word: re.Pattern[str]):
        super().__init__()
        self._model, self._word = model, word

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return np.frombuffer(b"".join(map(self.__getitem__, self._word.findall(text))), np.int32).tolist()

    def __missing__(self, word: str) -> bytes:
        ids = array("i", self._model.encode(word)).tobytes()
        if len(self) < _MOST and len(word) <= _MOST_CHARACTERS:
            self[word] = ids
        return ids
