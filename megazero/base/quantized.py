"""Size what values take when they are quantised to 8 or 4 bits in blocks (`zero.quantize`).

n values become the codes of all of them, then an fp32 scale for each block of `BLOCK`: n bits / 8 + 4 ceil(n / BLOCK)
bytes, rounded up to `ROUND`, so that what follows is aligned.
"""

BITS = {"none": None, "int8": 8, "int4": 4}  # of a code, by the words of `zero.quantize`
BLOCK = 256  # values that share a scale
ROUND = 16  # bytes; n is a multiple of as many elements, see plan/placements.py


def code_bytes(numel: int, bits: int) -> int:
    """Return the bytes of the codes alone."""
    return numel * bits // 8


def quantized_bytes(numel: int, bits: int) -> int:
    """Return the bytes of `numel` quantised values, scales included."""
    size = code_bytes(numel, bits) + 4 * -(-numel // BLOCK)
    return -(-size // ROUND) * ROUND


def sent_bytes(numel: int, bits: int | None, item: int) -> int:
    """Return the bytes of `numel` values on their way.

    Args:
        bits: of a code; None: they are sent as they are, `item` bytes each.
    """
    return numel * item if bits is None else quantized_bytes(numel, bits)
