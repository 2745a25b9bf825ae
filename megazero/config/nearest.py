"""Guess which key was meant by one that does not exist."""

import difflib


def nearest(key: str, known: list[str]) -> str:
    """Return a hint: the key of the same name in another section, else the key or section that is close, if any.

    Args:
        known: all keys (`option_keys`).
    """
    sections = sections_of(known)
    same = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    candidates = same or known + [section for section in sections if section.count(".") == key.count(".")]
    found = difflib.get_close_matches(key, candidates, n=1, cutoff=0.0 if same else 0.5)
    near = [each for each in found if _alike(each.rpartition(".")[2], key.rpartition(".")[2])]
    return f"did you mean {near[0]}?" if near else "see `megazero explain`"


def _alike(name: str, other: str) -> bool:
    """Return whether the last parts of two keys may be the same word: a section in common does not make them so."""
    return sorted(name) == sorted(other) or difflib.SequenceMatcher(None, name, other).ratio() > 0.5


def sections_of(known: list[str]) -> list[str]:
    """Return every section, nested ones too, of some dotted keys."""
    return sorted({key[:i] for key in known for i, char in enumerate(key) if char == "."})
