"""Guess which key was meant by one that does not exist."""

import difflib


def nearest(key: str, known: list[str]) -> str:
    """Return a hint: the keys, or sections, whose last word is spelt most alike; of several that of a section like its.

    The last word alone is compared: two keys are not alike because their section is.

    Args:
        known: all keys (`option_keys`).
    """
    places = known + [section for section in sections_of(known) if section.count(".") == key.count(".")]
    section, _, word = key.rpartition(".")
    words = {place: place.rpartition(".")[2] for place in places}
    cutoff = 0.6 if len(word) > 2 else 0.5  # two letters exchanged are half alike
    alike = difflib.get_close_matches(word, dict.fromkeys(words.values()), n=1, cutoff=cutoff)
    meant = {place.rpartition(".")[0]: place for place in places if words[place] in alike}
    near = difflib.get_close_matches(section, meant, n=1)
    meant = [meant[each] for each in near or meant]
    return f"did you mean {' or '.join(meant[:3])}?" if meant else "see `megazero explain`"


def sections_of(known: list[str]) -> list[str]:
    """Return every section, nested ones too, of some dotted keys."""
    return sorted({key[:i] for key in known for i, char in enumerate(key) if char == "."})
