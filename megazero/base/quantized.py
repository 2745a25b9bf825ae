"""Compute the size of values that are quantised to 8 or 4 bits in blocks (`zero.quantize`).

n values become n integer codes, then one fp32 scale for each `BLOCK` values: n * bits / 8 + 4 ceil(n / BLOCK) bytes,
rounded up to `ROUND`, so that the data after them is aligned.
"""

BITS = {"none": None, "int8": 8, "int4": 4}  # bits of a code for each value of a `zero.quantize` option
BLOCK = 256  # values that share a scale
ROUND = 16  # bytes; n is a multiple of as many elements, see plan/placements.py


def code_bytes(numel: int, bits: int) -> int:
    """Return the bytes of `numel` codes of `bits` bits, without scales."""
    return numel * bits // 8


def quantized_bytes(numel: int, bits: int) -> int:
    """Return the bytes of `numel` quantised values, scales included."""
    return -(-(code_bytes(numel, bits) + 4 * -(-numel // BLOCK)) // ROUND) * ROUND


def sent_bytes(numel: int, bits: int | None, item: int) -> int:
    """Return the bytes that sending `numel` values takes.

    Args:
        bits: of a code; None: the values are sent unquantised, `item` bytes each.
    """
    return numel * item if bits is None else quantized_bytes(numel, bits)
