"""Compute the number of ranks on an axis, without torch: a wrong number is reported at once."""

from megazero.base.errors import UserError


def data_size(world: int, tensor: int, pipeline: int) -> int:
    """Return the number of ranks that remain for the data axis.

    Raises:
        UserError: 106, the world is not divisible.
    """
    if world % (tensor * pipeline):
        what = "expected world % (parallel.tensor * parallel.pipeline) == 0, "
        what += f"got {world} % ({tensor} * {pipeline}) = {world % (tensor * pipeline)}"
        raise UserError(106, what, "start another number of ranks, or change parallel.tensor or parallel.pipeline")
    return world // (tensor * pipeline)
