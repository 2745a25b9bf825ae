"""The contract between a model and those who run it: the builder, the engine and the pipeline.

A model is an `nn.Module` that is a list of layers. It declares its parameters and allocates nothing. The builder asks
for its units, gives each unit memory, and hands the parameters back (`materialise`). The engine wraps the layers, so
that a unit's parameters are there when a layer runs. The pipeline runs a range of layers in each stage and scores the
output of the last one.

Each parameter has two attributes in addition to those of torch:

    declaration     what the parameter is (`parameter.Declaration`); the model sets it, `parameter.declare` does that
    gradient_slot   where its gradient goes (`GradientSlot`); the engine sets it, and without an engine there is none

A layer that uses a parameter must announce the use in forward (`Tape.use`) and deliver one gradient for it in backward
(one of the slot's `add`). The engine never reads `.grad`: a gradient that is left there is lost, and the parameter
trains on zeros.

Shapes: S sequence, B batch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from torch import Tensor, nn

from megazero.model.batch_context import BatchContext

TIED = "tied"  # the name of a unit that both the first and the last layer use
Layer = Callable[[Tensor, BatchContext], Tensor]
UnitDeclaration = tuple[str, list[tuple[str, nn.Parameter]]]  # its name; (full name, parameter) of each member


class GradientSlot(Protocol):
    """The place where the gradient of one parameter is accumulated.

    The first delivery overwrites what the memory held; later ones (of the next micro-batch, of another use) add to it.
    Shapes are those of this rank's part of the parameter.
    """

    def expect(self) -> None:
        """Announce one use of the parameter in forward; one delivery must follow in backward."""

    def add(self, gradient: Tensor) -> None:
        """Deliver a gradient of the parameter's shape."""

    def add_sum(self, rows: Tensor) -> None:
        """Deliver the gradient that is the sum of rows, each of the parameter's shape."""

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Deliver the gradient left @ right; the product is written where it belongs, without a copy."""

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Deliver a gradient that is zero except in some rows: values[i] is added to row rows[i]."""


class Model(Protocol):
    """A model that the engine and the pipeline can run.

    Attributes:
        layers: called one after the other, each with the output of the one before; the first gets tokens [S, B]. The
            builder replaces entries by wrapped layers, so a model must call its layers through this list only.
    """

    layers: list[Layer]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (full name, parameter) of every parameter once; a tied weight comes under its first name."""
        ...

    def units(self) -> list[UnitDeclaration]:
        """Return the units in forward order: groups of parameters that are sharded, gathered and updated together.

        Every parameter is in exactly one unit. A weight that the first and the last layer share is in a unit named
        `TIED` of its own. Names and order are the same on all ranks.
        """
        ...

    def units_of_layers(self) -> list[list[str]]:
        """Return for each layer the names of the units that it uses, in forward order."""
        ...

    def materialise(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put parameters that have memory in the place of the declared ones, by full name.

        Each keeps the declaration of the one that it replaces.
        """

    def forward_layers(self, parts: range, x: Tensor, step: BatchContext) -> Tensor:
        """Run the layers with these indices.

        Args:
            x: tokens [S, B] if the first layer is among them, else the output of the layer before.
        """
        ...

    def score(self, outputs: Tensor, targets_SB: Tensor, valid_SB: Tensor, /) -> Tensor:
        """Return the loss of each token in nats, [S, B], 0 where not valid; the last layer's output may be overwritten.

        The loss of a step is their sum over the global batch, divided by the number of valid tokens.
        """
        ...
