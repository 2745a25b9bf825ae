"""Guess which key was meant by one that does not exist."""

import difflib

_MOST = 3  # keys of a hint


def nearest(key: str, known: list[str]) -> str:
    """Return a hint: the keys of the same name in other sections, else the key or section that is close, if any.

    Args:
        known: all keys (`option_keys`).
    """
    sections, name = sections_of(known), _last(key)
    same = [each for each in known if _last(each) == name]
    if key.rpartition(".")[0] not in sections:  # it is the section that is misspelt
        same = difflib.get_close_matches(key, same, n=1, cutoff=0.0)
    near = same[:_MOST] or difflib.get_close_matches(key, [*known, *sections], n=1, cutoff=0.5)
    # A section in common does not make two keys alike.
    near = [each for each in near if difflib.get_close_matches(name, [_last(each)], cutoff=0.51)]
    return f"did you mean {' or '.join(near)}?" if near else "see `megazero explain`"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def sections_of(known: list[str]) -> list[str]:
    """Return every section, nested ones too, of some dotted keys."""
    return sorted({key[:i] for key in known for i, char in enumerate(key) if char == "."})
