"""Sizes of the axes, and the numbers of ranks that an error proposes."""

import pytest

from megazero.base.errors import UserError
from megazero.comm.sizes import shards_and_replicas


def test_the_data_axis_is_shards_times_replicas() -> None:
    assert shards_and_replicas(16, 2, 1, 4) == (4, 2)
    assert shards_and_replicas(16, 2, 2, None) == (4, 1)


def test_numbers_of_ranks_that_would_do_are_named() -> None:
    with pytest.raises(UserError, match=r"6 % \(2 \* 2\) = 2; start 4 or 8 ranks"):
        shards_and_replicas(6, 2, 2, None)
    with pytest.raises(UserError, match=r"8 % 3 = 2; change zero.shard_ranks"):
        shards_and_replicas(8, 1, 1, 3)
