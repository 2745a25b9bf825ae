"""Spread heads over more tensor ranks than there are key-value heads.

Ranks that share a group (query heads, key, value) compute equal parts of its projection, which may end inside a head,
and send each other the activations that their own query heads, and the group's key and value, need.
"""

from megazero.plan.model import Shape


def rows_for(shape: Shape, ranks: int) -> list[list[list[slice]]]:
    """Return the rows of tensor rank i's part of the projection that the heads of rank j need, [i][j], in order."""
    group = (shape.width + 2 * shape.kv_width) // shape.kv_heads
    sharing, queries = ranks // shape.kv_heads, shape.width // ranks
    part = group // sharing

    def needed(rank: int, by: int) -> list[slice]:
        start, place = by // sharing * group, by % sharing
        found = ((start + place * queries, queries), (start + group - 2 * shape.head_dim, 2 * shape.head_dim))
        cut = ((max(first, rank * part), min(first + count, rank * part + part)) for first, count in found)
        return [slice(a - rank * part, b - rank * part) for a, b in cut if a < b]

    return [[needed(i, j) for j in range(ranks)] for i in range(ranks)]


def counts(shape: Shape, ranks: int) -> list[list[int]]:
    """Return the number of rows that rank i has for rank j, [i][j]."""
    return [[sum(rows.stop - rows.start for rows in each) for each in row] for row in rows_for(shape, ranks)]
