"""One transformer block: the unit of sharding, recompute, pipeline cut and profiling.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))

A block is a `Layer` (`contract.py`) and nothing more: it knows neither its neighbours nor who runs it.
"""

from torch import Tensor, nn

from megazero.model.attention import Attention
from megazero.model.batch_context import BatchContext
from megazero.model.dropout import Dropout
from megazero.model.mlp import GeluMlp, SwigluMlp
from megazero.model.norm import LayerNorm, RMSNorm


class Block(nn.Module):
    def __init__(
        self,
        attention_norm: LayerNorm | RMSNorm,
        attention: Attention,
        mlp_norm: LayerNorm | RMSNorm,
        mlp: GeluMlp | SwigluMlp,
        dropouts: tuple[Dropout, Dropout],
    ):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_dropout, self.mlp_dropout = dropouts

    def forward(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        x_SBD, y_SBD = self._seen(self.attention(self.attention_norm(x_SBD), step), x_SBD, step)
        return self.mlp_dropout.add(self.mlp(y_SBD, step), x_SBD, step, skip_output=step.recomputing)

    def _seen(self, attended_SBD: Tensor, x_SBD: Tensor, step: BatchContext) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and its norm: in one pass if nothing is dropped between them."""
        if not self.attention_dropout.acts(step):
            return self.mlp_norm.of_sum(attended_SBD, x_SBD)
        x_SBD = self.attention_dropout.add(attended_SBD, x_SBD, step)
        return x_SBD, self.mlp_norm(x_SBD)
