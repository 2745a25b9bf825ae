"""Parse untrusted YAML within bounds.

With nested aliases (`&a [*b, *b]`) or merges (`<<`) a text of a few hundred bytes can expand to 2^40 values. So the
bytes, the nested brackets and the expanded values are limited. Real configurations are far below the limits.
"""

import warnings
from itertools import accumulate
from typing import Any

from ruamel.yaml import YAML

MOST_BYTES = 32 << 10
_MOST_VALUES = 10_000
_MOST_OPEN = 100


def parse_yaml(text: str, *, keeps_places: bool = False) -> Any:
    """Return the value of a YAML 1.2 text.

    Args:
        keeps_places: mappings know the line of each key, as in ruamel's round-trip mode.

    Raises:
        ValueError: the text exceeds a limit.
        ruamel.yaml.error.MarkedYAMLError, and Python's own errors (a 13th month): the text is not valid YAML.
    """
    if (size := len(text.encode(errors="surrogatepass"))) > MOST_BYTES:
        raise ValueError(f"expected at most {MOST_BYTES:,} bytes, got {size:,}")
    if max(accumulate((mark in "[{") - (mark in "]}") for mark in text), default=0) > _MOST_OPEN:
        raise ValueError(f"expected at most {_MOST_OPEN} nested brackets")  # the parser's time is quadratic
    if any(line.startswith("%") for line in text.splitlines()):
        raise ValueError("expected YAML 1.2 without directives (%)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ruamel warns about an anchor defined twice; the later definition counts
        found = YAML(typ="rt" if keeps_places else "safe", pure=True).load(text)
    if (values := _values(found, {})) > _MOST_VALUES:
        raise ValueError(f"expected at most {_MOST_VALUES:,} values, got {values:,} with aliases expanded")
    return found


def _values(tree: Any, known: dict[int, int]) -> int:
    """Return the number of values of a tree with all aliases expanded. Raises ValueError if the tree contains itself.

    Args:
        known: the counts of containers seen so far, by identity; 0 while a container is being counted.
    """
    if not isinstance(tree, dict | list):
        return 1
    if (count := known.get(id(tree))) is None:
        known[id(tree)] = 0
        children = tree.values() if isinstance(tree, dict) else tree
        count = known[id(tree)] = 1 + sum(_values(child, known) for child in children)
    elif count == 0:
        raise ValueError("an alias refers to a value that contains it")
    return count
