"""Choose the text of a record by the names of its fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megazero.base.errors import UserError

Refuse = Callable[[str], UserError]
MISSING = object()


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """Return the value of a record at a path: a key, or the keys of nested objects with dots between; else MISSING.

    Bytes, which columns of a table may hold, are decoded. Raises UnicodeDecodeError: they are not UTF-8.
    """
    found: Any = record
    for key in [path] if path in record else path.split("."):
        if not isinstance(found, dict) or key not in found:
            return MISSING
        found = found[key]
    return found.decode() if isinstance(found, bytes) else found


@dataclass(frozen=True)
class Piece:
    """A part of a document that is encoded separately.

    Attributes:
        text: at most WHOLE + PIECE_BYTES characters if read from a corpus; may be empty in a document's last piece.
        scored: its tokens are trained on.
        id: the id of the special token that `text` names; None: `text` is plain text.
        last: it ends its document.
        cut: it ends where the cut may change the document's ids.
    """

    text: str
    scored: bool = True
    id: int | None = None
    last: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Select:
    """Choose the text of a record; the subclass `Chat` (`data_tools/chat.py`) chooses a conversation.

    Attributes:
        fields: paths of the text; several texts are joined by a newline. For a conversation: the path of its messages.
    """

    fields: tuple[str, ...] = ("text",)

    def pieces(self, record: Any, refuse: Refuse) -> list[Piece]:
        """Return the pieces of a record's document.

        Raises:
            UserError: what `refuse(reason)` returns: the record lacks the text, or UTF-8 cannot encode the text.
        """
        pieces = self._taken(record, refuse)
        try:
            for piece in pieces:
                piece.text.encode()
        except UnicodeEncodeError as error:
            raise refuse(f"character {error.start:,} of the text is half a surrogate pair, not a character") from error
        return pieces

    def _taken(self, record: Any, refuse: Refuse) -> list[Piece]:
        return [Piece("\n".join([self._text_at(record, path, refuse) for path in self.fields]))]

    def _text_at(self, record: Any, path: str, refuse: Refuse) -> str:
        found = value_at(record, path) if isinstance(record, dict) else MISSING
        if isinstance(found, str):
            return found
        if not isinstance(record, dict):
            got = type(record).__name__
        else:
            got = f"keys {', '.join(record)[:60]}" if found is MISSING else f"{type(found).__name__} there"
        raise refuse(f'expected an object with text under "{path}", got {got}')
