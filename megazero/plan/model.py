"""The size and the arithmetic of a transformer, from its shape alone.

One model family is described: pre-norm decoder blocks, with the GPT choices (LayerNorm, biases, one up projection,
learned positions, tied head) or the Llama choices (RMSNorm, no biases, gated MLP, rotary positions, grouped kv heads).

Parameters. With L layers, width h, ffn f, vocabulary V, s learned positions, kv width k = kv_heads x head_dim:

    block      q, out: 2 h^2      k, v: 2 h k      mlp: 2 h f, gated 3 h f      two norms
    model      V h + s h  +  L blocks  +  one norm  +  V h if the head is not tied

For the GPT choices (k = h, f = 4 h, a bias on every linear) this is 12 L h^2 + 13 L h + (V + s) h + 2 h
(Narayanan et al. 2021, arXiv 2104.04473, eq. 2, which leaves out the last norm's 2 h).

Arithmetic. A product by a matrix of n elements costs 2 n FLOPs per token forward and twice that backward; the two
products of attention, scores and values, cost 2 s x width each. So one training token costs

    6 N + 12 L heads head_dim s            Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B

where N counts the parameters that take part in matrix products: the head once, tied or not, the lookup never. For the
GPT choices a batch of B sequences then costs 72 B L s h^2 (1 + s / (6 h) + V / (12 h L)), the *model FLOPs* of
Korthikanti et al. 2022, arXiv 2205.05198, appendix A. Both papers count causal attention in full, and so do we;
recompute is not counted: it is work the machine does, not work the model needs (MFU, not HFU).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A model's hyper-parameters, all resolved (no None), by the names of the config's section `model`.

    `megazero explain model` describes each; the defaults are the section's. The formulas, the model that trains and
    the search all read this one description.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    position: str = "learned"
    norm: str = "layernorm"
    activation: str = "gelu"
    dropout: float = 0.0
    tie_embeddings: bool = True
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def learned_positions(self) -> bool:
        """True if each position has a row of an embedding; rotary positions have no parameters."""
        return self.position == "learned"

    @property
    def layernorm(self) -> bool:
        """True with LayerNorm, whose models have biases in norms and linears; RMSNorm has none anywhere."""
        return self.norm == "layernorm"

    @property
    def gated(self) -> bool:
        """True if the MLP has gate, up and down projections (SwiGLU) instead of up and down."""
        return self.activation == "swiglu"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Return the width of the keys, and of the values: hidden, unless query heads share them."""
        return self.kv_heads * self.head_dim

    @property
    def num_mlp_inputs(self) -> int:
        """Return the number of projections from hidden to ffn: up, and gate where there is one."""
        return 2 if self.gated else 1

    def parameters(self) -> int:
        """Return the parameters of the whole model, each counted once (a tied head is the embedding)."""
        embedding = self.vocab * self.hidden
        positions = self.seq_len * self.hidden if self.learned_positions else 0
        head = 0 if self.tie_embeddings else self.vocab * self.hidden
        return embedding + positions + self.layers * self.block_parameters() + self._norm() + head

    def block_parameters(self) -> int:
        """Return the parameters of one block: four linears (five where gated), their biases, two norms."""
        biases = 0
        if self.layernorm:
            attention = self.hidden + 2 * self.kv_width + self.hidden  # q, k and v, out
            biases = attention + self.num_mlp_inputs * self.ffn + self.hidden
        return self._block_matrices() + biases + 2 * self._norm()

    def matmul_parameters(self) -> int:
        """Return the parameters that take part in matrix products: the blocks' linears and the head."""
        return self.layers * self._block_matrices() + self.vocab * self.hidden

    def flops_per_token(self) -> int:
        """Return the model FLOPs of one training token, forward and backward, in a sequence of seq_len tokens."""
        attention = 12 * self.layers * self.heads * self.head_dim * self.seq_len
        return 6 * self.matmul_parameters() + attention

    def head_in_blocks(self) -> float:
        """Return the cost of the output projection, in blocks (forward, and backward alike)."""
        block = 2 * self._block_matrices() + 4 * self.seq_len * self.heads * self.head_dim
        return 2 * self.vocab * self.hidden / block

    def _block_matrices(self) -> int:
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_width
        return attention + (self.num_mlp_inputs + 1) * self.hidden * self.ffn

    def _norm(self) -> int:
        return (2 if self.layernorm else 1) * self.hidden
