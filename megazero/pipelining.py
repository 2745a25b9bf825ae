"""How a config's model lies on the pipeline axis: which parts in which stage, and what every rank does in a step."""

from dataclasses import dataclass

from megazero.config import Config
from megazero.pipeline.split import split
from megazero.plan.model import ModelShape
from megazero.schedules.actions import Schedule
from megazero.schedules.catalogue import make
from megazero.schedules.lower import add_reductions, add_transfers
from megazero.schedules.simulate import peak_inputs, simulate


@dataclass(frozen=True)
class Layers:
    """How the model lies on the pipeline axis.

    Attributes:
        schedule, ranks, chunks: as in the config.
        rank_of: of each stage its rank.
        parts: of each stage the parts of the model's path: 0 is the embedding, the last the head.
    """

    schedule: str
    ranks: int
    chunks: int
    rank_of: tuple[int, ...]
    parts: list[range]

    def kept_inputs(self, micro_batches: int) -> list[int]:
        """Of each stage the most micro-batches whose forward has been and whose input's backward is still to come."""
        return peak_inputs(make(self.schedule, self.ranks, micro_batches, self.chunks))

    def of_rank(self, rank: int) -> dict[int, range]:
        return {stage: self.parts[stage] for stage, where in enumerate(self.rank_of) if where == rank}


def model_shape(config: Config) -> ModelShape:
    """The model as the closed formulas of plan/ see it: parameters, FLOPs."""
    m = config.model
    assert m.kv_heads is not None and m.ffn is not None, "a resolved config"
    return ModelShape(
        layers=m.layers,
        hidden=m.hidden,
        heads=m.heads,
        kv_heads=m.kv_heads,
        ffn=m.ffn,
        vocab=m.vocab,
        seq_len=m.seq_len,
        learned_positions=m.position == "learned",
        layernorm=m.norm == "layernorm",
        gated=m.activation == "swiglu",
        tied=m.tie_embeddings,
    )


def layers_of(config: Config) -> Layers:
    """The cut of a config's model."""
    name, ranks, chunks = config.pipeline.schedule, config.parallel.pipeline, config.pipeline.chunks
    assert chunks is not None, "a resolved config"
    rank_of = make(name, ranks, 1, chunks).rank_of
    parts = split(config.model.layers, rank_of, embedding=0.0, head=model_shape(config).head_in_blocks())
    return Layers(name, ranks, chunks, rank_of, parts)


def lowered(layers: Layers, micro_batches: int, *, each: bool, tied: bool) -> Schedule:
    """What every rank does in a step, proven to end.

    Args:
        each: gradients are reduced after each micro-batch, not once a step.
        tied: the first and the last stage share a weight.

    Raises:
        ScheduleError: it would not end; a fault of ours.
    """
    schedule = add_transfers(make(layers.schedule, layers.ranks, micro_batches, layers.chunks))
    schedule = add_reductions(schedule, each=each, tied=tied)
    simulate(schedule)
    return schedule
