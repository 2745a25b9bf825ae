"""Guess which key was meant by one that does not exist."""

import difflib

_MOST = 3  # keys of a hint


def nearest(key: str, known: list[str]) -> str:
    """Return a hint: the keys of the same name in other sections, else the key or section that is close, if any.

    Args:
        known: all keys (`option_keys`).
    """
    sections = sections_of(known)
    same = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    candidates = known + [section for section in sections if section.count(".") == key.count(".")]
    found = (
        same[:_MOST] if key.rpartition(".")[0] in sections else difflib.get_close_matches(key, same, n=1, cutoff=0.0)
    )
    found = found or difflib.get_close_matches(key, candidates, n=1, cutoff=0.5)
    near = [each for each in found if _alike(each.rpartition(".")[2], key.rpartition(".")[2])]
    return f"did you mean {' or '.join(near)}?" if near else "see `megazero explain`"


def _alike(name: str, other: str) -> bool:
    """Return whether the last parts of two keys may be the same word: a section in common does not make them so."""
    return sorted(name) == sorted(other) or difflib.SequenceMatcher(None, name, other).ratio() > 0.5


def sections_of(known: list[str]) -> list[str]:
    """Return every section, nested ones too, of some dotted keys."""
    return sorted({key[:i] for key in known for i, char in enumerate(key) if char == "."})
