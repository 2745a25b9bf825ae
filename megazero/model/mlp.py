"""The feed-forward part of a block: GELU (GPT) or SwiGLU (Llama).

Gate and up are two parameters, so that each is split over the tensor axis by whole rows.
"""

from torch import Tensor, nn

from megazero.kernels import reference as ops
from megazero.model.embedding import INITIAL_STD
from megazero.model.linear import ColumnLinear, RowLinear
from megazero.parallel.grid import Axis


class GeluMlp(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, hidden: int, ffn: int, *, bias: bool, out_std: float, tensor: Axis):
        super().__init__()
        self.up = ColumnLinear(hidden, ffn, bias=bias, std=INITIAL_STD, tensor=tensor)
        self.down = RowLinear(ffn, hidden, bias=bias, std=out_std, tensor=tensor)

    def forward(self, x_SBD: Tensor) -> Tensor:
        return self.down(ops.gelu(self.up(x_SBD)))


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, hidden: int, ffn: int, *, bias: bool, out_std: float, tensor: Axis):
        super().__init__()
        self.gate = ColumnLinear(hidden, ffn, bias=bias, std=INITIAL_STD, tensor=tensor)
        self.up = ColumnLinear(hidden, ffn, bias=bias, std=INITIAL_STD, tensor=tensor)
        self.down = RowLinear(ffn, hidden, bias=bias, std=out_std, tensor=tensor)

    def forward(self, x_SBD: Tensor) -> Tensor:
        return self.down(ops.swiglu(self.gate(x_SBD), self.up(x_SBD)))


def make_mlp(kind: str, hidden: int, ffn: int, *, bias: bool, out_std: float, tensor: Axis) -> GeluMlp | SwigluMlp:
    """`kind` is "gelu" or "swiglu"."""
    return {"gelu": GeluMlp, "swiglu": SwigluMlp}[kind](hidden, ffn, bias=bias, out_std=out_std, tensor=tensor)
