"""The test vectors of docs/numerics.md, against the code and against an implementation made from the page's text alone.

The second one uses Python integers and neither torch nor the code's constants, so that text, tables and code can only
agree if each of them is right.
"""

import re
from statistics import NormalDist

import pytest
import torch
import xxhash

from megazero.kernels import counter
from tests.tiny_run import ROOT

PAGE = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
WORD, GOLDEN = 2**32, 0x9E3779B9
SEED, NAME = 1234, "blocks.0.mlp.up.weight"
DROPOUT, DROP = (3, 5, 2, 1), 0.3


def table(*columns: str) -> list[list[str]]:
    """The rows of the page's table with these columns."""
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    assert PAGE.count(head) == 1, f"not one table of {columns}"
    rows = re.match(r"(?:\|.*\|\n)+", PAGE.partition(head)[2])
    assert rows is not None
    return [line.strip("| ").split(" | ") for line in rows[0].splitlines()]


MIXED, KEYS = table("word", "mix"), table("integers", "key")
VALUES, KEPT = table("index", "h", "value"), table("sample", "position", "kept")


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ (x >> 16)


def key(*integers: int) -> int:
    k = 0
    for n in integers:
        for word in (n % WORD, n // WORD):
            k = (mix(k ^ word) + GOLDEN) % WORD
    return k


def turned(h: int) -> int:
    return h ^ 0x80000000


def value_hash(seed: int, name: str, i: int) -> int:
    digest = xxhash.xxh64_intdigest(name.encode(), seed=0)
    first = key(seed, digest, i // WORD)
    return mix(mix((i % WORD + first) % WORD) ^ key(first, digest))


def kept(first: int, sample: int, position: int, channel: int, drop: float) -> bool:
    r = mix(mix(((sample ^ (sample // WORD * GOLDEN)) + first) % WORD) ^ position)
    h = mix((r + channel * GOLDEN) % WORD ^ key(first, 1))
    return turned(h) >= min(round(drop * WORD), WORD - 1)


def test_the_page_says_for_what_the_tables_are() -> None:
    assert f"Values for seed {SEED} and the name `{NAME}`" in PAGE
    assert "(seed {}, step {}, layer {}, site {}) and drop {}".format(*DROPOUT, DROP) in PAGE
    indices = [int(row[0]) for row in VALUES]
    assert {65535, 65536, WORD - 1, WORD, WORD + 1} <= set(indices), "both sides of a block's end and of 2^32"
    assert {"0", "1"} == set("".join(row[2] for row in KEPT)) and any(int(row[0]) > WORD for row in KEPT)


@pytest.mark.parametrize(("word", "mixed"), MIXED)
def test_mixed_words(word: str, mixed: str) -> None:
    assert mix(int(word, 16)) == counter.mix_word(int(word, 16)) == int(mixed, 16)


@pytest.mark.parametrize(("integers", "expected"), KEYS)
def test_keys(integers: str, expected: str) -> None:
    words = [int(word) for word in integers.split(", ")]
    assert key(*words) == counter.derive_key(*words) == int(expected, 16)


@pytest.mark.parametrize(("index", "hashed", "value"), VALUES)
def test_initial_values(index: str, hashed: str, value: str) -> None:
    i = int(index)
    h = value_hash(SEED, NAME, i)
    assert h == int(hashed, 16)
    # Another processor's vectorised erfinv may round otherwise; another hash gives another number altogether.
    assert float(counter.normal(SEED, NAME, i, i + 1)) == pytest.approx(float(value), rel=1e-13, abs=0)
    # Another library's inverse of the normal distribution agrees to about 1e-13.
    assert NormalDist().inv_cdf((turned(h) + 0.5) / WORD) == pytest.approx(float(value), rel=1e-11, abs=1e-12)


@pytest.mark.parametrize(("sample", "position", "bits"), KEPT)
def test_kept_elements(sample: str, position: str, bits: str) -> None:
    first = key(*DROPOUT)
    where = int(sample), int(position)
    mask = counter.keep_mask(
        first, torch.tensor([where[0]]), torch.tensor([where[1]]), torch.arange(len(bits)), DROP
    ).flatten()
    assert "".join("01"[bool(keep)] for keep in mask) == bits
    assert "".join("01"[kept(first, *where, channel, DROP)] for channel in range(len(bits))) == bits
