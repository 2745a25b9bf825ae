"""The size and the arithmetic of a transformer, from its shape alone.

One model family is described: pre-norm decoder blocks, with the GPT choices (LayerNorm, biases, one up projection,
learned positions, tied head) or the Llama choices (RMSNorm, no biases, gated MLP, rotary positions, grouped kv heads).

Parameters. With L layers, width h, ffn f, vocabulary V, s learned positions, kv width k = kv_heads x head_dim:

    block      q, out: 2 h^2      k, v: 2 h k      mlp: 2 h f, gated 3 h f      two norms
    model      V h + s h  +  L blocks  +  one norm  +  V h if the head is not tied

For the GPT choices (k = h, f = 4 h, a bias on every linear) this is 12 L h^2 + 13 L h + (V + s) h + 2 h
(Narayanan et al. 2021, arXiv 2104.04473, eq. 2, which leaves out the last norm's 2 h).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A model's hyper-parameters, all resolved (no None), named as in the config's section `model`.

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
    qk_norm: str = "none"

    @property
    def learned_positions(self) -> bool:
        """True if each position has a row of an embedding; rotary positions have no parameters."""
        return self.position == "learned"

    @property
    def layernorm(self) -> bool:
        """True with LayerNorm, whose models have biases in norms and linears; models with RMSNorm have no biases."""
        return self.norm == "layernorm"

    @property
    def gated(self) -> bool:
        """True if the MLP has gate, up and down projections (SwiGLU) instead of up and down."""
        return self.activation == "swiglu"

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Return the width of the keys, and of the values: hidden, unless query heads share them."""
        return self.kv_heads * self.head_dim

    @property
    def num_mlp_inputs(self) -> int:
        """Return the number of projections from hidden to ffn: up, and gate where there is one."""
        return 2 if self.gated else 1
