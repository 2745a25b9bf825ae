"""What fails on some ranks stops all; the lowest of them says why."""

import pytest
import torch

from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.agreement import agree
from megazero.comm.grid import Grid, single
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def fail_on(grid: Grid, bad: tuple[int, ...]) -> str:
    def action() -> int:
        if grid["world"].rank in bad:
            raise UserError(205, f"on {grid['world'].rank}")
        return grid["world"].rank

    try:
        return str(agree(grid["world"], CPU, action))
    except FailedElsewhere as error:
        return f"elsewhere: {error} ({error.exit_code})"
    except UserError as error:
        return str(error)


def test_all_have_their_result_or_all_stop():
    elsewhere = "elsewhere: MZ-205: stopped, because rank 1 failed (1)"
    assert run_ranks(3, fail_on, ()) == ["0", "1", "2"]
    assert run_ranks(3, fail_on, (1, 2)) == [elsewhere, "MZ-205: on 1", elsewhere]
    assert fail_on(single(), ()) == "0" and fail_on(single(), (0,)) == "MZ-205: on 0"


def test_a_fault_of_our_own_is_not_kept_back():
    with pytest.raises(ZeroDivisionError):
        agree(single()["world"], CPU, lambda: 1 // 0)
