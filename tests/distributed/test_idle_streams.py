"""Streams on which nothing is sent: they say that they are used, and an abort ends them."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest
from hosting import python_threads, sockets
from linking import HANG_S, sides, streams, until

from crews import Relay, crew_of, forked, shared_files
from zbpipe import _native
from zbpipe.program import compile
from zbpipe.runtime import bridge, link
from zbpipe.runtime.bridge import Incoming, Outgoing
from zbpipe.schedule import build

_NEVER_S = 1e6  # longer than any hang guard
_SHORT_S = 0.02


@pytest.mark.parametrize("aborts", [0, 1])
def test_an_abort_ends_what_waits_on_silent_streams(monkeypatch, aborts) -> None:
    monkeypatch.setattr(bridge, "_LOOK_S", _NEVER_S)  # nobody wakes to say that it is still here
    gc.collect()
    before = sockets(), shared_files(), python_threads()
    ends = sides(20.0)
    for sender, receiver in (ends, ends[::-1]):
        out, back = streams()
        sender.sends(out, 2)
        receiver.receives(back, 2)
    for end in ends:
        end.link.start()
    carriers = [one.over for end in ends for one in (*end.link.outgoing, *end.link.incoming)]
    until(lambda: len(python_threads()) == 8)  # speak, listen, and one a stream, on both sides
    assert not any(over.is_set() for over in carriers)
    ends[aborts].board.abort(aborts, message="planned")
    until(lambda: python_threads() == [])
    for end in ends:
        assert end.board.failure() == (aborts, -1, "-", -1, "r", "planned")
    assert all(over.is_set() for over in carriers)
    link.close_all([end.link for end in ends])
    assert sockets() == before[0]  # although the links are still there
    del ends, sender, receiver, end
    gc.collect()
    assert (sockets(), shared_files(), python_threads()) == before


def test_an_abort_ends_silent_streams_where_the_peer_does_not_answer(monkeypatch) -> None:
    monkeypatch.setattr(bridge, "_LOOK_S", _NEVER_S)
    monkeypatch.setattr(link, "_SETTLE_S", _SHORT_S)
    gc.collect()
    before = sockets(), shared_files()
    near, far = sides(_NEVER_S)  # far is never started
    out, back = streams()
    near.sends(out, 1)
    other, away = streams()
    near.receives(other, 1)
    near.link.start()
    until(lambda: len(python_threads()) == 4)
    near.board.abort(0, message="planned")
    until(lambda: python_threads() == [])
    for end in (near.link, far.link, back, away):
        end.close()
    assert sockets() == before[0]
    del near, far, end
    gc.collect()
    assert (sockets(), shared_files()) == before


def _head(stream: Any) -> tuple[int, ...]:
    text = bytearray(bridge._HEAD.size)
    stream.receive(text)
    return tuple(bridge._HEAD.unpack(text))


def test_an_idle_stream_says_that_it_is_used(monkeypatch) -> None:
    monkeypatch.setattr(bridge, "_LOOK_S", _SHORT_S)
    board, sender = _native.Board.create(2), _native.Sender(1)
    ours, theirs = streams()
    theirs.limit(HANG_S)
    outgoing = Outgoing(board, ours, _native.Outlet(board, 0, sender))
    thread = threading.Thread(target=outgoing.run, daemon=True)
    thread.start()
    still_here = (bridge._STILL_HERE, 0, 0, 0)
    for number in range(3):
        assert [_head(theirs) for _ in range(3)] == [still_here] * 3
        assert outgoing.carried == number
        sender.announce(0, b"abc", 5)
        while (head := _head(theirs)) == still_here:
            pass
        assert head == (0, 3, 5, 0)
        text = bytearray(3)
        theirs.receive(text)
        assert text == b"abc"
        until(lambda want=number + 1: outgoing.carried == want)
    outgoing.finish()
    while (head := _head(theirs)) == still_here:
        pass
    assert head == (bridge._NO_MORE, 0, 0, 0)
    theirs.send(bridge._GOT_ALL)
    thread.join(HANG_S)
    assert outgoing.arrived
    for stream in (ours, theirs):
        stream.close()


def test_a_stream_that_is_busy_says_nothing_else(monkeypatch) -> None:
    monkeypatch.setattr(bridge, "_LOOK_S", _NEVER_S)
    board, sender = _native.Board.create(2), _native.Sender(3)
    ours, theirs = streams()
    theirs.limit(HANG_S)
    outgoing = Outgoing(board, ours, _native.Outlet(board, 0, sender))
    for slot in (2, 0, 1):
        sender.announce(slot, b"", slot)
    outgoing.finish()
    thread = threading.Thread(target=outgoing.run, daemon=True)
    thread.start()
    heads = [_head(theirs) for _ in range(4)]
    assert heads == [(2, 0, 2, 0), (0, 0, 0, 0), (1, 0, 1, 0), (bridge._NO_MORE, 0, 0, 0)]
    theirs.send(bridge._GOT_ALL)
    thread.join(HANG_S)
    for stream in (ours, theirs):
        stream.close()


def test_a_sign_is_no_message_to_the_receiver() -> None:
    board = _native.Board.create(2)
    ours, theirs = streams()
    theirs.limit(HANG_S)
    inlet = _native.Inlet(board, 1, 2)
    incoming = Incoming(board, ours, inlet)
    thread = threading.Thread(target=incoming.run, daemon=True)
    thread.start()
    sign = bridge._HEAD.pack(bridge._STILL_HERE, 0, 0, 0)
    for slot in (0, 1):
        theirs.send(sign, sign, bridge._HEAD.pack(slot, 2, 0, 0), b"ab", sign)
    theirs.send(bridge._HEAD.pack(bridge._NO_MORE, 0, 0, 0))
    answer = bytearray(1)
    theirs.receive(answer)
    assert answer == bridge._GOT_ALL
    thread.join(HANG_S)
    assert incoming.over.is_set()
    assert board.failure() is None
    # Both messages lie in their slots, which are taken.
    assert [inlet.room(slot, 1, 0, 0, 0.0) for slot in (0, 1)] == [None, None]
    for stream in (ours, theirs):
        stream.close()


def _with_pauses(world: Any) -> int:
    """Steps whose messages have signs before, between and after them; returns how many signs."""
    os.environ["ZBPIPE_HOST"] = str(world.rank)
    bridge._LOOK_S = 0.001
    signs = 0
    real = bridge.Stream.send

    def counted(stream: Any, *parts: Any) -> None:
        nonlocal signs
        signs += parts == (bridge._HEAD.pack(bridge._STILL_HERE, 0, 0, 0),)
        real(stream, *parts)

    bridge.Stream.send = counted  # type: ignore[method-assign]
    programs = compile(build("zb_h1", 2, 4))
    crew = crew_of(world, programs)
    loaded = crew.load(programs)
    relay = Relay(crew, loaded, world.rank, 7, 50_000)

    def slowly(index: int) -> None:
        time.sleep(0.005)
        relay(index)

    for run in range(3):
        relay.begin(run)
        crew.run(loaded, {world.rank: slowly})
    crew.close()
    assert python_threads() == []
    return signs


def test_steps_go_on_among_signs() -> None:
    for outcome in forked(_with_pauses, 2):
        assert outcome.get() > 3
