"""How long an end in order waits: for as long as the peer moves, and `timeout` seconds more.

Time is the tests' own: it leaps, by less or more than `timeout`, when everything has been seen.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hosting import python_threads
from linking import HANG_S, Side, sides, streams, until

from zbpipe import _native
from zbpipe.program import compile
from zbpipe.runtime import bridge, link
from zbpipe.runtime.executor import _native_program
from zbpipe.schedule import build

_TIMEOUT_S = 1000.0  # no real second counts
_LESS, _MORE = 0.9 * _TIMEOUT_S, 1.1 * _TIMEOUT_S
_KEPT = 1 << 16  # bytes that the system keeps of a stream that nobody reads; it doubles them
_MESSAGE = b"x" * (16 * _KEPT)
_COUNT = 4


class _Time:
    """What link.py sees of `time`."""

    def __init__(self) -> None:
        self.ahead, self.looks = 0.0, 0

    def monotonic(self) -> float:
        self.looks += threading.current_thread().name == "closing"
        return time.monotonic() + self.ahead

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)


class _Closing:
    """Rank 0 has published messages and closes; the test is what rank 1 does with them."""

    def __init__(self, clock: _Time) -> None:
        self.clock = clock
        self.near, self.far = sides(_TIMEOUT_S)
        out, self.stream = streams()
        self.stream.limit(HANG_S)
        out.roomy(_KEPT)
        self.stream._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KEPT)
        sender = self.near.sends(out, _COUNT)
        for slot in range(_COUNT):
            sender.announce(slot, _MESSAGE, 0)
        self.far.link.start()
        self.near.link.start()
        self.thread = threading.Thread(target=self.near.link.depart, name="closing", daemon=True)
        self.thread.start()
        self.looked()

    @property
    def carried(self) -> int:
        return int(self.near.link.outgoing[0].carried)

    def looked(self) -> None:
        """Wait until the closing thread has looked at everything again, or has ended."""
        seen = self.clock.looks
        until(lambda: self.clock.looks > seen + 1 or not self.thread.is_alive())

    def leap(self, seconds: float, heard: bool = True) -> None:
        self.clock.ahead += seconds
        if heard:  # rank 1 still speaks
            now = self.clock.monotonic()
            until(lambda: self.near.link._heard >= now or not self.thread.is_alive())
        self.looked()

    def takes(self) -> None:
        """Rank 1 takes a message."""
        count = self.carried
        self.stream.receive(bytearray(bridge._HEAD.size + len(_MESSAGE)))
        until(lambda: self.carried > count)
        self.looked()

    def last_word(self) -> None:
        """Rank 1 speaks once more, and has been heard."""
        far = self.far.link
        made, *rest = far._clock.stamp()
        far._stream.send(link._HEAD.pack(link._ALIVE, made, *rest), self.far.board.report())
        until(lambda: self.near.link._clock._last[0] == made)

    def waits(self) -> bool:
        return self.thread.is_alive()

    def ends(self) -> bool:
        """Whether it is an end in order."""
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()
        return self.near.link._departed

    def over(self) -> None:
        self.far.link._over.set()
        for end in (self.near, self.far):
            end.link._end()
        link.close_all([self.near.link, self.far.link])
        self.stream.close()
        assert python_threads() == []


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = _Time()
    monkeypatch.setattr(link, "time", clock)
    found = _Closing(clock)
    yield found
    found.over()


def test_an_end_waits_for_as_long_as_messages_are_taken(closing: _Closing) -> None:
    for _ in range(_COUNT):
        closing.leap(_LESS)
        assert closing.waits()
        closing.takes()
    assert closing.clock.ahead > 2 * _TIMEOUT_S
    assert closing.waits()  # for the word that all are there
    head = bytearray(bridge._HEAD.size)
    closing.stream.receive(head)
    assert bridge._HEAD.unpack(head)[0] == bridge._NO_MORE
    closing.stream.send(bridge._GOT_ALL)
    assert closing.ends()
    until(closing.near.link._answered.is_set)  # rank 1 has heard it
    assert closing.near.board.failure() is None


def test_an_end_waits_for_as_long_as_the_peer_works(closing: _Closing) -> None:
    """Nothing is taken, but what rank 1 does changes."""
    step = _steps_of(closing.far)
    for _ in range(4):
        closing.leap(_LESS)
        assert closing.waits()
        count = closing.near.board.changes(1)
        step()
        until(lambda seen=count: closing.near.board.changes(1) != seen)
        closing.looked()
    assert closing.clock.ahead > 3 * _TIMEOUT_S
    closing.leap(_MORE)
    assert not closing.ends()


def _steps_of(side: Side) -> Callable[[], None]:
    programs = compile(build("1f1b", 1, 1))
    program = _native_program(programs.ranks[0])
    executor = _native.Executor(side.board, side.rank, 30.0)

    def step() -> None:
        assert _native.run(side.board, side.rank, [(executor, program, lambda _: True)], 10**9)

    return step


def test_an_end_gives_up_where_nothing_moves(closing: _Closing) -> None:
    closing.takes()
    closing.leap(_LESS)
    assert closing.waits()
    closing.leap(_TIMEOUT_S - _LESS + 1)
    assert not closing.ends()
    assert closing.carried < _COUNT


def test_an_end_gives_up_where_the_peer_is_silent(closing: _Closing) -> None:
    """Although messages are taken: whoever says nothing for so long has no rank that works."""
    with closing.far.link._voice:  # it wants to speak, and cannot
        closing.last_word()
        closing.leap(_LESS, heard=False)
        assert closing.waits()
        closing.takes()
        assert closing.waits()
        closing.leap(_TIMEOUT_S - _LESS + 1, heard=False)
        assert not closing.ends()
