"""Counters of messages carry on past 2^32 and past 2^31, where a difference changes its sign."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crews import Relay, crew_of, forked
from zbpipe import _native
from zbpipe.program import compile
from zbpipe.schedule import build

# channel.hpp, SlotState: bytes of one, and where its counters lie.
_STATE, _READY, _FREE = 128, 0, 64
_SHORT = 3  # messages a slot may still have before its counters wrap
_RUNS = 6


def _counter(fd: int, slot: int, which: int) -> int:
    (count,) = struct.unpack("=I", os.pread(fd, 4, slot * _STATE + which))
    return int(count)


def _relayed(world: Any, hosts: str, schedule: str, first: int) -> int:
    """Steps back to back over channels whose counters begin at `first`; returns slots seen."""
    os.environ["ZBPIPE_HOST"] = hosts[world.rank]
    ends: list[tuple[Any, int]] = []
    sender, outlet, inlet = _native.Sender, _native.Outlet, _native.Inlet

    def new_sender(slots: int) -> Any:
        ends.append((sender(slots, first), slots))
        return ends[-1][0]

    def new_inlet(board: Any, rank: int, slots: int) -> Any:
        ends.append((inlet(board, rank, slots, first), slots))
        return ends[-1][0]

    _native.Sender, _native.Inlet = new_sender, new_inlet
    _native.Outlet = lambda board, rank, of: outlet(board, rank, of, first)
    programs = compile(build(schedule, len(hosts), 7))
    crew = crew_of(world, programs)
    loaded = crew.load(programs)
    relay = Relay(crew, loaded, world.rank, 5, 20_000)
    for run in range(_RUNS):
        crew.run(loaded, {world.rank: relay.begin(run)})
    world.gather(None)  # every message has been read
    for end, slots in ends:
        for slot in range(slots):
            ready, free = (_counter(end.fd, slot, which) for which in (_READY, _FREE))
            count = (ready - first) % 2**32
            assert _SHORT < count <= _RUNS * 14  # a microbatch's F and I are messages at most
            assert ready == (first + count) % 2**32
            assert (ready - free) % 2**32 <= 1  # the last may be held until the next is wanted
    crew.close()
    return sum(slots for _, slots in ends)


@pytest.mark.parametrize("first", [2**32 - _SHORT, 2**31 - _SHORT])
@pytest.mark.parametrize(
    ("hosts", "schedule"), [("aa", "1f1b"), ("ab", "1f1b"), ("aba", "zb_h1"), ("ab", "zb_v")]
)
def test_messages_are_what_was_sent_when_counters_wrap(hosts, schedule, first) -> None:
    for outcome in forked(_relayed, len(hosts), hosts, schedule, first):
        assert outcome.get() > 0


@given(
    st.integers(1, 5),
    st.sampled_from([0, 2**31, 2**32, 2**32 + 2**31]),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=20, max_size=60),
)
def test_an_outlet_gives_slots_in_their_order_round_the_ring(slots, wrap, short, actions) -> None:
    """Slots are published as they are vacant, in any order, and taken as often as they can be.

    The ring's count passes `wrap`, whatever the number of slots leaves of it.
    """
    first = max(0, wrap - short)
    board = _native.Board.create(2)
    sender = _native.Sender(slots, first % 2**32)
    outlet = _native.Outlet(board, 0, sender, first)
    waiting: list[tuple[int, bytes]] = []
    for number, (wanted, takes) in enumerate(actions):
        vacant = [slot for slot in range(slots) if slot not in {held for held, _ in waiting}]
        if vacant and not takes:
            slot = vacant[wanted % len(vacant)]
            sender.announce(slot, str(number).encode(), 0)
            waiting.append((slot, str(number).encode()))
        elif waiting:
            parcel = outlet.take(0.0)
            assert (parcel.slot, bytes(parcel.memory)) == waiting.pop(0)
            outlet.done(parcel.slot)
    outlet.finish()
    assert outlet.finished == (not waiting)
    for slot, header in waiting:
        parcel = outlet.take(0.0)
        assert (parcel.slot, bytes(parcel.memory)) == (slot, header)
        outlet.done(slot)
    assert outlet.finished
    assert outlet.take(0.0) is None
