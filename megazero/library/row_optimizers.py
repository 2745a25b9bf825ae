"""Update only the rows of a table that a step has touched.

adagrad   s_r += mean_j g_rj^2;   w_r -= lr g_r / (sqrt(s_r) + eps)
          one number of state for each row (row-wise AdaGrad: Duchi et al. 2011, with the mean over a row in the
          place of each element's own sum, as recommenders train their tables; Naumov et al. 2019, DLRM)
adam      the moments of touched rows alone decay and grow; the bias correction counts all steps
          (lazy Adam; the same as torch.optim.SparseAdam)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megazero.base.errors import UserError

_DEFAULTS: dict[str, dict[str, Any]] = {
    "adagrad": {"lr": 1e-2, "eps": 1e-10},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8},
}


class RowOptimizer(Protocol):
    """An update of some rows of a table."""

    @property
    def lr(self) -> float:
        """Return its learning rate."""
        ...

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        """Return new state for a rank's rows [n, D] of a table, by name; its first dim is theirs."""
        ...

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], touched: Tensor, gradients: Tensor, lr: float, step: int
    ) -> None:
        """Update `rows[touched]`; `touched` has each row once, `step` counts from 1."""
        ...


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Row-wise AdaGrad."""

    lr: float
    eps: float

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        return {"sum": torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)}

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], touched: Tensor, gradients: Tensor, lr: float, step: int
    ) -> None:
        total = state["sum"][touched] + gradients.square().mean(1)
        state["sum"][touched] = total
        rows.index_add_(0, touched, gradients / (total.sqrt() + self.eps).unsqueeze(1), alpha=-lr)


@dataclass(frozen=True)
class LazyAdam:
    """Adam that leaves rows alone which a step has not touched."""

    lr: float
    betas: tuple[float, float]
    eps: float

    def state(self, rows: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(rows), "exp_avg_sq": torch.zeros_like(rows)}

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], touched: Tensor, gradients: Tensor, lr: float, step: int
    ) -> None:
        moments = []
        for name, beta, new in zip(state, self.betas, (gradients, gradients.square()), strict=True):
            moments.append(torch.lerp(state[name][touched], new, 1.0 - beta))
            state[name][touched] = moments[-1]
        first, second = moments
        rate = lr * math.sqrt(1.0 - self.betas[1] ** step) / (1.0 - self.betas[0] ** step)
        rows.index_add_(0, touched, first / (second.sqrt() + self.eps), alpha=-rate)


def row_optimizer(asked: str | Mapping[str, Any]) -> RowOptimizer:
    """Return the optimizer of tables that was asked for. Raises UserError 501."""
    options = {"name": asked} if isinstance(asked, str) else dict(asked)
    name = options.pop("name", None)
    if name not in _DEFAULTS:
        do = f"give one of {', '.join(_DEFAULTS)}"
        raise UserError(501, f"no optimizer of tables is called {name!r}", do, where="table_optimizer")
    if odd := sorted(options.keys() - _DEFAULTS[name].keys()):
        raise UserError(501, f"{name} has no option {odd[0]!r}", f"it has {', '.join(_DEFAULTS[name])}")
    return (RowwiseAdagrad if name == "adagrad" else LazyAdam)(**{**_DEFAULTS[name], **options})
