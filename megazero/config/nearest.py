"""Suggest existing keys for an unknown one."""

import difflib

_MOST = 3  # keys of a hint


def nearest(key: str, known: list[str]) -> str:
    """Return a hint: keys of the same name in other sections, else the most similar key or section, if any.

    Args:
        known: all keys (`option_keys`).
    """
    sections, name = sections_of(known), _last(key)
    same = [each for each in known if _last(each) == name]
    if key.rpartition(".")[0] not in sections:  # the section is misspelt
        same = difflib.get_close_matches(key, same, n=1, cutoff=0.0)
    near = same[:_MOST] or difflib.get_close_matches(key, [*known, *sections], n=1, cutoff=0.5)
    # Compare the last parts too: a common section alone does not make two keys similar.
    near = [each for each in near if _alike(name, _last(each))]
    return f"did you mean {' or '.join(near)}?" if near else "see `megazero explain`"


def _alike(a: str, b: str) -> bool:
    return sorted(a) == sorted(b) or bool(difflib.get_close_matches(a, [b], cutoff=0.51))


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def sections_of(known: list[str]) -> list[str]:
    """Return all sections, nested ones included, of dotted keys."""
    return sorted({key[:i] for key in known for i, char in enumerate(key) if char == "."})
