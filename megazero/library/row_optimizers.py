"""Update only the rows of a table that a step has touched.

adagrad   s_r += mean_j g_rj^2;   w_r -= lr g_r / (sqrt(s_r) + eps)
          one number of state for each row (row-wise AdaGrad: Duchi et al. 2011, with the mean over a row in
          place of a sum for each element, as recommenders train their tables; Naumov et al. 2019, DLRM)
adam      only the moments of touched rows are updated; the bias correction counts all steps
          (lazy Adam, as torch.optim.SparseAdam)

Both have `state`, which returns new state for a rank's rows [n, D] by name, and `update`, which updates
`rows[touched]`; `touched` has each row once, and `step` counts from 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megazero.base.errors import UserError


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Row-wise AdaGrad."""

    lr: float = 1e-2
    eps: float = 1e-10

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        """Return zero sums, one per row: [n]."""
        return {"sum": torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)}

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], touched: Tensor, gradients: Tensor, lr: float, step: int
    ) -> None:
        """Update `rows[touched]`, in place."""
        total = state["sum"][touched] + gradients.square().mean(1)
        state["sum"][touched] = total
        rows.index_add_(0, touched, gradients / (total.sqrt() + self.eps).unsqueeze(1), alpha=-lr)


@dataclass(frozen=True)
class LazyAdam:
    """Adam that updates only the rows that a step has touched."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        """Return zero moments, each [n, D]."""
        return {"exp_avg": torch.zeros_like(rows), "exp_avg_sq": torch.zeros_like(rows)}

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], touched: Tensor, gradients: Tensor, lr: float, step: int
    ) -> None:
        """Update `rows[touched]`, in place."""
        moments = []
        for name, beta, new in zip(state, self.betas, (gradients, gradients.square()), strict=True):
            moments.append(torch.lerp(state[name][touched], new, 1.0 - beta))
            state[name][touched] = moments[-1]
        first, second = moments
        rate = lr * math.sqrt(1.0 - self.betas[1] ** step) / (1.0 - self.betas[0] ** step)
        rows.index_add_(0, touched, first / (second.sqrt() + self.eps), alpha=-rate)


RowOptimizer = RowwiseAdagrad | LazyAdam
_KINDS: dict[str, type[RowOptimizer]] = {"adagrad": RowwiseAdagrad, "adam": LazyAdam}


def row_optimizer(asked: str | Mapping[str, Any]) -> RowOptimizer:
    """Return the optimizer of tables that was asked for. Raises UserError 501."""
    options: dict[str, Any] = {"name": asked} if isinstance(asked, str) else dict(asked)
    kind = _KINDS.get(name := options.pop("name", ""))
    if kind is None:
        do = f"give one of {', '.join(_KINDS)}"
        raise UserError(501, f"unknown table optimizer {name!r}", do, where="table_optimizer")
    known = [field.name for field in fields(kind)]
    if odd := sorted(options.keys() - known):
        raise UserError(501, f"{name} has no option {odd[0]!r}", f"it has {', '.join(known)}")
    return kind(**options)
