"""How many ranks an axis of the grid has. No torch: whoever asks for a wrong number hears of it at once."""

from megazero.base.errors import UserError


def data_size(world: int, tensor: int, pipeline: int) -> int:
    """Return what remains of the world for the data axis.

    Raises:
        UserError: 106, nothing whole remains.
    """
    if world % (tensor * pipeline):
        what = "expected world % (parallel.tensor * parallel.pipeline) == 0, "
        what += f"got {world} % ({tensor} * {pipeline}) = {world % (tensor * pipeline)}"
        raise UserError(106, what, "start another number of ranks, or change parallel.tensor or parallel.pipeline")
    return world // (tensor * pipeline)
