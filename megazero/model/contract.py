"""Define the contract between a model and the code that runs it: the builder, the engine and the pipeline.

A model is an `nn.Module` with a list of layers. It declares its parameters and allocates nothing. The builder reads its
units, gives each unit memory, and returns the parameters to the model (`materialise`). The engine wraps the layers so
that a unit's parameters are gathered when a layer runs. The pipeline runs a range of layers in each stage; with targets
in the context the last layer returns the losses.

Each parameter has two attributes in addition to those of torch:

    declaration     shape, initial values and layout (`parameter.Declaration`); the model sets it by `parameter.declare`
    gradient_slot   the place for its gradient (`GradientSlot`); the engine sets it, without an engine there is none

A layer that uses a parameter must announce the use in forward (`Tape.use`) and deliver one gradient for it in backward
(by one of the slot's `add` methods). The engine never reads `.grad`: a gradient left there is lost, and the parameter
is trained on zeros.

Shapes: S sequence, B batch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from torch import Tensor, nn

from megazero.model.batch_context import BatchContext

TIED = "tied"  # the name of a unit that both the first and the last layer use
Layer = Callable[[Tensor, BatchContext], Tensor]
UnitDeclaration = tuple[str, list[tuple[str, nn.Parameter]]]  # (name, [(full name, parameter) of each member])


class GradientSlot(Protocol):
    """The place where the gradient of one parameter is accumulated.

    The first delivery overwrites the memory; later ones (of the next micro-batch, of another use) add to it. Shapes
    are those of this rank's part of the parameter.
    """

    def expect(self) -> None:
        """Announce one use of the parameter in forward; one delivery must follow in backward."""

    def add(self, gradient: Tensor) -> None:
        """Deliver a gradient of the parameter's shape; it may be wider than the parameter."""

    def add_sum(self, rows: Tensor) -> None:
        """Deliver a gradient as the sum of `rows` over its first dimension; each row has the parameter's shape."""

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Deliver the gradient left @ right; the product is written to its place without a copy."""

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Deliver a gradient that is zero except in some rows: values[i] is added to row rows[i]."""


class Model(Protocol):
    """A model that the engine and the pipeline can run.

    Attributes:
        layers: called in order, each with the previous one's output; the first receives tokens [S, B]. The builder
            replaces entries by wrapped layers, so a model must call its layers only through this list.
    """

    layers: list[Layer]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (full name, parameter) for every parameter once; a tied weight has its first name."""
        ...

    def units(self) -> list[UnitDeclaration]:
        """Return the units in forward order: groups of parameters that are sharded, gathered and updated together.

        Every parameter is in exactly one unit. A weight that the first and the last layer share is alone in a unit
        named `TIED`. Names and order are equal on all ranks.
        """
        ...

    def units_of_layers(self) -> list[list[str]]:
        """Return for each layer the names of the units that it uses, in forward order."""
        ...

    def materialise(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace declared parameters, by full name, with parameters that have memory; keep their declarations."""

    def forward_layers(self, parts: range, x: Tensor, step: BatchContext) -> Tensor:
        """Run the layers with these indices.

        The last layer returns the loss of each token in nats, [S, B], 0 where not valid, if `step` has targets; it may
        overwrite `x`. The loss of a step is the sum over the global batch, divided by the number of valid tokens.

        Args:
            x: tokens [S, B] if the first layer is among them, else the previous layer's output.
        """
        ...
