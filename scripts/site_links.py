"""Turn links to files of the repository into their paths, for `make docs`: a site has the documents alone."""

import re
from typing import Any

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\(\.\./(?P<path>[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with `[text](../path)` as text and path; links between documents stay."""
    return _LINK.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, path = link["text"], link["path"]
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
