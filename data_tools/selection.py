"""Choose the text of a record by the names of its fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megazero.base.errors import UserError

Refuse = Callable[[str], UserError]
MISSING = object()


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """Return what a record holds under a path: a key, or keys of objects inside each other, with dots between.

    Bytes, which columns of a table may hold, are text. Raises UnicodeDecodeError: they are not UTF-8.
    """
    found: Any = record
    for key in [path] if path in record else path.split("."):
        if not isinstance(found, dict) or key not in found:
            return MISSING
        found = found[key]
    return found.decode() if isinstance(found, bytes) else found


@dataclass(frozen=True)
class Piece:
    """A part of a document, which is encoded by itself.

    Attributes:
        text: of a corpus at most WHOLE + PIECE_BYTES characters; the last piece of a document may be empty.
        scored: its tokens are trained on.
        id: of the special token whose name the text is; None: the text is text.
        last: it ends its document.
        cut: it ends where the ids may not be those of the whole document.
    """

    text: str
    scored: bool = True
    id: int | None = None
    last: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Select:
    """Take a text of a record; the subclass `Chat` (`data_tools/chat.py`) takes a conversation.

    Attributes:
        fields: paths of the text; of several, the texts are joined by a line end. Of a conversation: of its messages.
    """

    fields: tuple[str, ...] = ("text",)

    def pieces(self, record: Any, refuse: Refuse) -> list[Piece]:
        """Return the document of a record in pieces.

        Raises:
            UserError: made by `refuse`: the record has not what is to be taken, or text that UTF-8 cannot hold.
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
