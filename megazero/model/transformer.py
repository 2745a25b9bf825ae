"""The model: embedding, a for-loop over blocks, head.

The options of `Shape` select and mix the features of today's dense models; a family, such as GPT-2 or Llama, is a set
of options. The model is built on torch's meta device: nothing is allocated before `zero/` gives
each unit its memory.

Shapes: S sequence, B batch, D hidden, V vocabulary of this rank. Activations are sequence first.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from megazero.comm.grid import Axis
from megazero.comm.regions import Region
from megazero.kernels.operations import Operations
from megazero.model.batch_context import BatchContext
from megazero.model.block import Block
from megazero.model.contract import TIED, Layer, UnitDeclaration
from megazero.model.dropout import Dropout
from megazero.model.embedding import PositionEmbedding, TokenEmbedding
from megazero.model.linear import ColumnProducts
from megazero.model.loss import HeadLoss
from megazero.model.norm import Norm
from megazero.model.parameter import declaration_of, declare
from megazero.model.rotary import Rotary
from megazero.model.tape import apply
from megazero.plan.model import Shape


class Embedding(nn.Module):
    """The token embedding, plus learned positions if the model has them, then dropout."""

    def __init__(self, shape: Shape, *, seed: int, region: Region, ops: Operations):
        super().__init__()
        std = shape.init_std
        self.tokens = TokenEmbedding(shape.vocab, shape.hidden, std=std, region=region)
        self.positions = PositionEmbedding(shape.seq_len, shape.hidden, std=std) if shape.learned_positions else None
        self._scale = shape.embedding_scale
        self.dropout = Dropout(shape.dropout, seed=seed, layer=shape.layers, site=0, ops=ops)

    def forward(self, tokens_SB: Tensor, step: BatchContext) -> Tensor:
        """Return the embedded tokens, [S, B, D]."""
        x_SBD = self.tokens(tokens_SB)
        if self._scale != 1:
            x_SBD = x_SBD * self._scale
        if self.positions is not None:
            x_SBD = x_SBD + self.positions(step.document_positions(len(x_SBD)))
        return self.dropout(x_SBD, step)


class Head(nn.Module):
    """The final norm and the output projection, whose weight is the token embedding's if tied.

    Args:
        shape, chunk: see `HeadLoss`.
    """

    def __init__(
        self, norm: Norm, weight_VD: nn.Parameter, region: Region, *, shape: Shape, chunk: int, ops: Operations
    ):
        super().__init__()
        self.norm, self.weight = norm, weight_VD
        self._product, self._z_loss = ColumnProducts(region, self._parameters), shape.z_loss
        self.loss = HeadLoss(region, self._parameters, shape=shape, chunk=chunk, ops=ops)

    def forward(self, x_SBD: Tensor, step: BatchContext) -> Tensor:
        """Return token losses [S, B]; without targets, logits [S, B, V] of this rank's part of the vocabulary.

        With `step.greedy` losses and flags, [2, S, B]. With a cache the logits of the last token alone, [1, B, V].
        """
        x_SBD = x_SBD if step.cache is None else x_SBD[-1:].contiguous()
        x_ND = apply(self.norm, x_SBD).flatten(0, 1)
        if step.targets_SB is None or step.valid_SB is None:
            (logits_NV,) = apply(self._product, x_ND)
            logits_NV = self.loss.shaped(logits_NV)
            return logits_NV.view(-1, x_SBD.shape[1], logits_NV.shape[-1])
        z_loss = self._z_loss if step.training else 0.0
        targets_N, valid_N = step.targets_SB.reshape(-1), step.valid_SB.reshape(-1)
        losses = apply(self.loss, x_ND, targets_N, valid_N, z_loss, step.greedy)
        return losses.view(-1, *step.targets_SB.shape) if step.greedy else losses.view_as(step.targets_SB)


class Transformer(nn.Module):
    """A GPT or Llama model on the meta device; implements `contract.Model`.

    Args:
        shape: the hyper-parameters.
        seed: of the run; initial weights and dropout masks are functions of it and of names.
        tensor: the axis that splits matrices and the vocabulary.
        sequence: split the sequence over the tensor axis between the matrices (sequence parallelism).
        chunks: number of chunks of each gather and sum over the tensor axis in forward (`Region`).
        loss_chunk: number of tokens whose logits exist at a time (`HeadLoss`); 0: all.
        ops: the kernels to use.

    Attributes:
        rotaries: the rotary positions of each block; blocks with equal ones share them. None: the block has none.
        layers: embedding, blocks, head; forward calls them only through this list, as the builder replaces entries.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        seed: int,
        tensor: Axis,
        sequence: bool,
        ops: Operations,
        chunks: int = 1,
        loss_chunk: int = 0,
    ):
        super().__init__()
        self.shape, self.tensor = shape, tensor
        ropes = [shape.rope_of(shape.kind(i)) for i in range(shape.layers)]
        made = {rope: Rotary(rope, shape.head_dim, shape.seq_len) for rope in ropes if rope is not None}
        self.rotaries = [None if rope is None else made[rope] for rope in ropes]
        self._regions = [Region(tensor, sequence, name, chunks) for name in ("embedding", "block", "head")]
        embedding, block, head = self._regions
        self.embedding = Embedding(shape, seed=seed, region=embedding, ops=ops)
        blocks = (Block(shape, i, each, seed=seed, region=block, ops=ops) for i, each in enumerate(self.rotaries))
        self.blocks = nn.ModuleList(blocks)
        weight = self.embedding.tokens.weight
        if not shape.tie_embeddings:
            weight = declare((shape.vocab, shape.hidden), std=shape.init_std, decay=True, axis=tensor)
        self.head = Head(Norm(shape, shape.hidden, ops), weight, head, shape=shape, chunk=loss_chunk, ops=ops)
        self.layers: list[Layer] = [self.embedding, *self.blocks, self.head]

    def forward(self, tokens_SB: Tensor, step: BatchContext) -> Tensor:
        """Return next-token logits [S, B, V] over this rank's part of the vocabulary."""
        return self.forward_layers(range(len(self.layers)), tokens_SB, step)

    def forward_layers(self, parts: range, x: Tensor, step: BatchContext) -> Tensor:
        """Run a range of layers on the output of the previous layer (see `contract.Model`)."""
        for i in parts:
            x = self.layers[i](x, step)
        return x

    def own_rows(self, rows: int) -> int:
        """Return how many of `rows` rows of the residual stream this rank holds."""
        return rows // self.tensor.size if self._regions[0].sequence else rows

    @contextmanager
    def whole_sequence(self) -> Iterator[None]:
        """Hold all rows on every tensor rank inside the context: a single new token cannot be split."""
        before = self._regions[0].sequence
        try:
            for region in self._regions:
                region.sequence = False
            yield
        finally:
            for region in self._regions:
                region.sequence = before

    def losses(self, tokens_SB: Tensor, targets_SB: Tensor, valid_SB: Tensor, step: BatchContext) -> Tensor:
        """Return the loss of each token in nats, 0 where not valid: [S, B]."""
        return self(tokens_SB, step.scored(targets_SB, valid_SB))

    def materialise(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace declared parameters, by full name, with parameters that have memory."""
        for name, parameter in parameters.items():
            owner, _, last = name.rpartition(".")
            part = self.get_submodule(owner)
            parameter.declaration = declaration_of(getattr(part, last))  # type: ignore[attr-defined]
            setattr(part, last, parameter)
        if self.shape.tie_embeddings:
            self.head.weight = self.embedding.tokens.weight

    def units(self) -> list[UnitDeclaration]:
        """Return the units in forward order: the tied weight, if there is one, the embedding, each block, the head."""
        tied = [(TIED, [("embedding.tokens.weight", p) for p in self._tied()])]
        return [unit for unit in tied + self._own_units() if unit[1]]

    def units_of_layers(self) -> list[list[str]]:
        """Return for each layer the names of the units that it uses."""
        tied, own = [TIED] * len(self._tied()), self._own_units()
        return [tied * (i in (0, len(own) - 1)) + [name] * bool(members) for i, (name, members) in enumerate(own)]

    def _own_units(self) -> list[UnitDeclaration]:
        """Return a unit for each layer, without the tied weight; a unit may have no members."""
        tied, blocks = {id(p) for p in self._tied()}, ((f"blocks.{i}", block) for i, block in enumerate(self.blocks))
        found: list[tuple[str, nn.Module]] = [("embedding", self.embedding), *blocks, ("head", self.head)]
        return [(name, [(n, p) for n, p in part.named_parameters(name) if id(p) not in tied]) for name, part in found]

    def _tied(self) -> list[nn.Parameter]:
        return [self.embedding.tokens.weight] if self.shape.tie_embeddings else []
