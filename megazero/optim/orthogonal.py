"""Orthogonalise a matrix: replace its singular values by numbers near 1 (Newton-Schulz iteration).

    X <- a X + (b G + c G G) X    G = X X^T    (a, b, c) = (3.4445, -4.7750, 2.0315)

from X = M / |M|, five times by default (Jordan et al. 2024, Muon). The result is U S V^T, where U and V are those of M
and the singular values S are between about 0.7 and 1.2. An iteration takes 4 m^2 n + 2 m^3 operations, m the shorter
side.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megazero.plan.matrices import workspace

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7  # keeps a zero matrix zero


class Orthogonaliser:
    """Orthogonalises matrices in memory that is allocated once.

    Args:
        shapes: the rows and columns of all matrices.
        steps: number of iterations.

    Attributes:
        nbytes: bytes of the memory.
    """

    def __init__(self, shapes: Iterable[tuple[int, int]], steps: int, dtype: torch.dtype, device: torch.device):
        (wide, square), self._steps = workspace(shapes), steps
        self._wide = [torch.empty(wide, dtype=dtype, device=device) for _ in range(2)]
        self._square = [torch.empty(square, dtype=dtype, device=device) for _ in range(2)]
        self.nbytes = sum(each.nbytes for each in (*self._wide, *self._square))

    def __call__(self, rows_TRC: Tensor, factor: float) -> None:
        """Replace a matrix by `factor` times its orthogonalised value.

        Args:
            rows_TRC: the matrix of T x R rows and C columns, perhaps a strided view.
        """
        turns, each, columns = rows_TRC.shape
        tall = turns * each > columns
        there = rows_TRC.permute(2, 0, 1) if tall else rows_TRC
        m, n = sorted((turns * each, columns))
        x, y = (memory[: m * n].view(m, n) for memory in self._wide)
        gram, polynomial = (memory[: m * m].view(m, m) for memory in self._square)
        x.view(there.shape).copy_(there)
        x.div_(x.norm().clamp(min=_EPS))
        for _ in range(self._steps):
            torch.mm(x, x.T, out=gram)
            torch.addmm(gram, gram, gram, beta=_B, alpha=_C, out=polynomial)
            torch.addmm(x, polynomial, x, beta=_A, out=y)
            x, y = y, x
        there.copy_(x.mul_(factor).view(there.shape))
