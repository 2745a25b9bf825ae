"""Replace links to repository files by paths, for `make docs`, as the site contains only the documents."""

import re
from typing import Any

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\(\.\./(?P<path>[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `[text](../path)` by text and path; keep links between documents."""
    return _LINK.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, path = link["text"], link["path"]
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
