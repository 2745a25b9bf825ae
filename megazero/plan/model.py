"""The size and the arithmetic of a transformer, from its shape alone.

With L layers, width h, ffn f, vocabulary V, s learned positions, q and k the widths of all queries and of keys:

    block      q, out: 2 h q      k, v: 2 h k      mlp: 2 h f, gated 3 h f      norms
    model      V h + s h  +  L blocks  +  one norm  +  V h if the head is not tied

For GPT-2 (q = k = h, f = 4 h, a bias on every linear) this is 12 L h^2 + 13 L h + (V + s) h + 2 h parameters
(Narayanan et al. 2021, arXiv 2104.04473, eq. 2, which leaves out the last norm's 2 h).
"""

from dataclasses import dataclass

from megazero.plan.matrices import Matrix


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `model/rotary.py` has the formulas; docs/models.md describes the fields."""

    theta: float = 10000.0
    share: float = 1.0
    kind: str = "plain"
    factor: float = 1.0
    original: int = 1
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all: float | None = None
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    alpha: float = 1.0


@dataclass(frozen=True)
class Kind:
    """A kind of block.

    Attributes:
        window: a token attends to this many tokens, itself and those before it; None: to all before it.
        rope: its rotary positions, in a model with rotary positions; None: no positions.
    """

    window: int | None = None
    rope: Rope | None = Rope()


@dataclass(frozen=True)
class Shape:
    """A model's hyper-parameters, all resolved (no None), named as in the config's section `model`.

    `megazero explain model` describes each; the defaults are the section's. The formulas, the model that trains and
    the search all read this one description.

    Attributes:
        head_size: `model.head_dim`; None: hidden / heads.
        biases: the places that have biases: qkv, out, mlp, norm; None: all of them with LayerNorm, else none.
        query_scale: (beta, original): queries at position p are multiplied by 1 + beta ln(1 + floor(p / original)).
        attention_cap, logit_cap: `model.softcap.attention`, `model.softcap.logits`.
        kinds: the kinds of the first blocks; they repeat, so block i has kind i mod their number.
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
    qk_norm: str = "none"
    qk_norm_at: str = "before"
    norm_place: str = "pre"
    norm_offset: int = 0
    norm_cast: str = "before"
    residual: str = "serial"
    head_size: int | None = None
    biases: frozenset[str] | None = None
    attention_scale: float | None = None
    query_scale: tuple[float, int] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float | None = None
    logit_cap: float | None = None
    init_std: float = 0.02
    init_depth: bool = True
    z_loss: float = 0.0
    kinds: tuple[Kind, ...] = (Kind(),)

    def kind(self, block: int) -> Kind:
        """Return the kind of a block by its index, from 0."""
        return self.kinds[block % len(self.kinds)]

    def counted(self, blocks: range | None = None) -> dict[Kind, int]:
        """Return how many of these blocks are of each kind; None: of all blocks."""
        blocks, period = range(self.layers) if blocks is None else blocks, len(self.kinds)
        found: dict[Kind, int] = {}
        for i in blocks[:period]:
            kind = self.kind(i)
            found[kind] = found.get(kind, 0) + len(range(i, blocks.stop, period))
        return found

    def rope_of(self, kind: Kind) -> Rope | None:
        """Return the rotary positions of the blocks of a kind, if they have any."""
        return None if self.learned_positions else kind.rope

    @property
    def learned_positions(self) -> bool:
        """True if each position has a row of an embedding; rotary positions have no parameters."""
        return self.position == "learned"

    @property
    def layernorm(self) -> bool:
        """True with LayerNorm, which has a bias; RMSNorm has none."""
        return self.norm == "layernorm"

    @property
    def gated(self) -> bool:
        """True if the MLP has gate, up and down projections (SwiGLU) instead of up and down."""
        return self.activation in ("swiglu", "geglu")

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def width(self) -> int:
        """Return the width of the queries of all heads: hidden, unless the head dim is given."""
        return self.heads * self.head_dim

    @property
    def qkv_matrix(self) -> Matrix:
        """Return the matrices of the projection: queries, keys and values, whose rows take turns for each group."""
        queries, group = self.width // self.kv_heads, self.width // self.kv_heads + 2 * self.head_dim
        parts = (0, queries), (queries, queries + self.head_dim), (queries + self.head_dim, group)
        return Matrix(self.kv_heads * group, self.hidden, parts, group)

    @property
    def kv_width(self) -> int:
        """Return the width of the keys, and of the values: that of the queries, unless query heads share them."""
        return self.kv_heads * self.head_dim

    @property
    def residual_std(self) -> float:
        """Return the initial std of a block's output projections.

        With `init_depth`, init_std / sqrt(number of residual additions), as in GPT-2 (section 2.3): two in each block.
        """
        return self.init_std / (2 * self.layers) ** 0.5 if self.init_depth else self.init_std

    @staticmethod
    def block_length(window: int | None) -> int:
        """Return the number of queries in a block of attention: half a window; at least 128, as fewer are slow."""
        return max(128, (window or 0) // 2)

    def biased(self, place: str) -> bool:
        """Return whether a place has biases: qkv, out or mlp; norm: only a LayerNorm can."""
        return self.layernorm if self.biases is None else place in self.biases

    def window_of(self, kind: Kind) -> int | None:
        """Return the window of the blocks of a kind; None: a token attends to all before it."""
        return None if kind.window is None or kind.window >= self.seq_len else kind.window

    @property
    def num_mlp_inputs(self) -> int:
        """Return the number of projections from hidden to ffn: up, and gate where there is one."""
        return 2 if self.gated else 1
