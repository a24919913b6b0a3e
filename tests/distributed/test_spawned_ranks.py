"""Ranks that `spawn` makes: how they part."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from crews import process_state, spawned


def _leaves_first(rank: int) -> None:
    """Rank 1 is through at once; what it is to rank 0 must last until that is through, too."""
    pids: list[int | None] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        time.sleep(1.0)
        assert pids[1] is not None
        assert process_state(pids[1]) in ("R", "S", "D")


def test_who_is_through_waits_for_the_others() -> None:
    spawned(_leaves_first, 2)


def _fails(rank: int) -> None:
    if rank == 0:
        raise ArithmeticError("planned")


def test_who_is_through_does_not_wait_for_one_that_failed() -> None:
    with pytest.raises(ProcessRaisedException, match="ArithmeticError: planned"):
        spawned(_fails, 2)
