"""Compute the number of ranks on an axis, without torch, so that a wrong number is reported at once."""

from megazero.base.errors import UserError


def shards_and_replicas(
    world: int, tensor: int, pipeline: int, shard_ranks: int | None, key: str = "zero.shard_ranks"
) -> tuple[int, int]:
    """Return the sizes of the shard and the replica axis, which together are the data axis.

    Args:
        shard_ranks: data ranks over which ZeRO shards; None: all.
        key: the option that sets `shard_ranks`, for error messages.

    Raises:
        UserError: 106, tensor x pipeline does not divide the world, or `shard_ranks` does not divide the data ranks.
    """
    copy = tensor * pipeline
    data, rest = divmod(world, copy)
    if rest:
        what = "expected world % (parallel.tensor * parallel.pipeline) == 0, "
        what += f"got {world} % ({tensor} * {pipeline}) = {rest}"
        ranks = " or ".join(str(n) for n in (data * copy, (data + 1) * copy) if n)
        raise UserError(106, what, f"start {ranks} ranks, or change parallel.tensor or parallel.pipeline")
    shard = data if shard_ranks is None else shard_ranks
    if data % shard:
        what = f"expected data ranks % {key} == 0, got {data} % {shard} = {data % shard}"
        raise UserError(106, what, f"change {key} or the number of ranks")
    return shard, data // shard
