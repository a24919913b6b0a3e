"""How processes get connected, and what is said where that does not work."""

from __future__ import annotations

import os

import pytest

from crews import crew_of, forked
from zbpipe.errors import ConfigError
from zbpipe.program import compile
from zbpipe.runtime import meeting
from zbpipe.schedule import build


def _unreachable(world):
    """Rank 2 is given addresses where nobody is; rank 0, of a lower number, only waits for it."""
    os.environ["ZBPIPE_HOST"] = str(world.rank)
    meeting._MEET_S = meeting._ARRIVE_S = 1.0
    real = meeting.connect

    def connect(address, *rest):
        return real((["127.0.0.1"], 1) if world.rank == 2 else address, *rest)

    meeting.connect = connect
    with pytest.raises(ConfigError) as raised:
        crew_of(world, compile(build("1f1b", 3, 3)))
    return str(raised.value)


def test_the_cause_is_named_not_who_waited_for_it() -> None:
    for outcome in forked(_unreachable, 3):
        said = outcome.get()
        assert "process 2 (rank 2) is not connected to process 0 (rank 0)" in said
        assert "no answer at port 1 of 127.0.0.1" in said
        assert "GLOO_SOCKET_IFNAME" in said


def _cut_off(world):
    """The connection stands, and then nothing comes through."""
    os.environ["ZBPIPE_HOST"] = str(world.rank)

    class Silent:
        def __init__(self, *_):
            raise ConnectionError("timed out")

    meeting.Link = Silent
    with pytest.raises(ConfigError) as raised:
        crew_of(world, compile(build("1f1b", 2, 2)))
    return str(raised.value)


def test_a_link_over_which_nothing_comes_is_named() -> None:
    for outcome in forked(_cut_off, 2):
        said = outcome.get()
        assert "is not connected to process 1 (rank 1): timed out; GLOO_SOCKET_IFNAME" in said
