"""The parts of a pipeline over hosts: who shares one, messages that are carried, clocks, ends."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hosting import python_threads
from hypothesis import given
from hypothesis import strategies as st

from crews import Relay, crew_of, forked, lane_threads, shared_files
from zbpipe import _native
from zbpipe.program import compile
from zbpipe.runtime import hosts, link
from zbpipe.runtime.hosts import Processes, group
from zbpipe.runtime.link import Clock
from zbpipe.schedule import build

WORKER = str(Path(__file__).parent / "host_worker.py")
_HANG_S = 60


def _relay(world, schedule, ranks, microbatches, runs, largest):
    """Messages of random sizes and contents over hosts, steps back to back; slots are poisoned."""
    os.environ["ZBPIPE_HOST"] = str(world.rank % 2)
    programs = compile(build(schedule, ranks, microbatches))
    crew = crew_of(world, programs)
    loaded = crew.load(programs)
    relay = Relay(crew, loaded, world.rank, 3, largest)
    for run in range(runs):
        crew.run(loaded, {world.rank: relay.begin(run)})
    crew.close()
    assert lane_threads() == shared_files() == python_threads() == []


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "runs", "largest"),
    [("1f1b", 2, 8, 40, 5000), ("zb_v", 3, 6, 10, 100_000), ("zb_h1", 2, 4, 6, 3_000_000)],
)
def test_what_is_carried_is_what_was_sent(schedule, ranks, microbatches, runs, largest) -> None:
    for outcome in forked(_relay, ranks, schedule, ranks, microbatches, runs, largest):
        outcome.get()


def _late_reader(world):
    """Rank 0 has long closed when rank 1 takes what it sent last."""
    os.environ["ZBPIPE_HOST"] = str(world.rank)
    programs = compile(build("1f1b", 2, 6), forward_only=True)
    crew = crew_of(world, programs, timeout=20.0)
    loaded = crew.load(programs)
    relay = Relay(crew, loaded, world.rank, 0, 200_000).begin(0)

    def slow(index):
        if world.rank == 1:
            time.sleep(0.3)
        relay(index)

    crew.run(loaded, {world.rank: slow})
    crew.close()
    return len(relay.order)


def test_what_was_sent_before_a_close_still_arrives() -> None:
    for outcome in forked(_late_reader, 2):
        assert outcome.get() == 12  # F and, to pass the loss back, I of six microbatches


def test_a_header_that_is_announced_is_carried_without_its_payload() -> None:
    board = _native.Board.create(2)
    sender = _native.Sender(2)
    outlet, inlet = _native.Outlet(board, 0, sender), _native.Inlet(board, 1, 2)
    much = 1 << 40  # far more than there is memory
    for slot in (1, 0):
        sender.announce(slot, b"what it is about", much)
        parcel = outlet.take(1.0)
        assert (parcel.slot, parcel.header) == (slot, 16)
        assert (parcel.payload, parcel.carried) == (much, 0)
        assert bytes(parcel.memory) == b"what it is about"
        with pytest.raises(RuntimeError, match="in use"):
            sender.announce(slot, b"", 0)
        place = inlet.room(slot, parcel.header, parcel.payload, parcel.carried, 0.1)
        assert place.nbytes == 16
        inlet.commit(place)
        outlet.done(slot)
    sender.announce(1, b"", 0)
    assert outlet.take(1.0).nbytes == 0
    assert outlet.take(0.05) is None
    assert not outlet.finished
    outlet.finish()
    assert outlet.finished


def test_a_place_is_given_when_the_last_message_was_let_go_of() -> None:
    board = _native.Board.create(2)
    inlet = _native.Inlet(board, 1, 1)
    first = inlet.room(0, 3, 5, 5, 0.1)
    assert first.nbytes == 64 + 5
    inlet.commit(first)
    assert inlet.room(0, 3, 5, 5, 0.05) is None
    with pytest.raises(RuntimeError, match="slot that is not there"):
        inlet.room(1, 3, 5, 5, 0.05)
    with pytest.raises(RuntimeError, match="all of its payload or nothing"):
        inlet.room(0, 3, 5, 4, 0.05)
    free = _native.Inlet(board, 1, 1)
    for header, payload in [(1 << 32, 0), (0, (1 << 63) + 1), (3, 2**64 - 1)]:
        for carried in (0, payload):
            with pytest.raises(RuntimeError, match="more than fits into memory"):
                free.room(0, header, payload, carried, 0.05)


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_whoever_waits_for_a_message_or_a_place_is_woken(end) -> None:
    board = _native.Board.create(2)
    outlet = _native.Outlet(board, 0, _native.Sender(1))
    inlet = _native.Inlet(board, 1, 1)
    inlet.commit(inlet.room(0, 1, 0, 0, 0.1))
    found = []
    seconds = _HANG_S if end == "abort" else 0
    waiters = [
        threading.Thread(target=lambda: found.append(outlet.take(_HANG_S))),
        threading.Thread(target=lambda: found.append(inlet.room(0, 1, 0, 0, _HANG_S))),
        threading.Thread(target=lambda: found.append(board.watch(seconds))),
    ]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.1)
    if end == "abort":
        board.abort(0, message="over")
    else:
        outlet.finish()
        inlet.finish()
    for waiter in waiters:
        waiter.join(_HANG_S / 2)
        assert not waiter.is_alive()
    assert sorted(map(str, found)) == sorted(["None", "None", str(end == "abort")])


def test_a_report_tells_of_a_failure_and_of_nobody_who_lives_here() -> None:
    here, there = _native.Board.create(3), _native.Board.create(3)
    for rank in (1, 2):
        here.place_elsewhere(rank)
    there.place_elsewhere(0)
    executors = [_native.Executor(there, rank, 30.0) for rank in (1, 2)]
    here.adopt(there.report())
    assert here.failure() is None
    there.abort(2, 1, "W", 3, "r", "ValueError: ü")
    here.adopt(there.report())
    assert here.failure() == (2, 1, "W", 3, "r", "ValueError: ü")
    for executor in executors:
        executor.stop()
    with pytest.raises(RuntimeError, match="report of another board"):
        here.adopt(_native.Board.create(2).report())


_ROW = struct.Struct("@iIIIqqiic??")  # board_report.cpp: Board::Row
_COUNTS = 16_000


def _rows(text: bytes, size: int) -> list[tuple[Any, ...]]:
    step = _ROW.size + -_ROW.size % 8
    start = len(text) - size * step
    return [_ROW.unpack_from(text, start + rank * step) for rank in range(size)]


def _adopts(world: Any, numbers: range) -> Any:
    """Rank 0 opens a board, both adopt what was said of rank 2 at odd, or even, times."""
    own = _native.Board.create(3)
    pid, fd = world.gather((os.getpid(), own.fd))[0]
    board = own if world.rank == 0 else _native.Board.open(pid, fd, 3)
    if world.rank == 0:
        board.place_elsewhere(2)
    text = bytearray(_native.Board.create(3).report())
    at = len(text) - _ROW.size - -_ROW.size % 8
    wrong = 0
    for count in numbers:
        # Of two reports, one to each process, the newer has to stay.
        own_count = 2 * count + (count + world.rank) % 2
        row = (2, own_count, 0, own_count, 0, 0, own_count, own_count, b"F", True, False)
        _ROW.pack_into(text, at, *row)
        world.gather(None)
        board.adopt(bytes(text))
        world.gather(None)
        _, state, _, changes, _, _, stage, microbatch, *_ = _rows(board.report(), 3)[2]
        wrong += {state, changes, stage, microbatch} != {2 * count + 1}
        assert board.changes(2) == changes
    return wrong


def test_an_older_word_never_overwrites_a_newer_one_of_another_process() -> None:
    for outcome in forked(_adopts, 2, range(1, _COUNTS)):
        assert outcome.get() == 0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.data())
def test_processes_of_one_host_reach_each_other_both_ways(ids, data) -> None:
    everybody = range(len(ids))
    reach = [data.draw(st.sets(st.sampled_from(everybody))) | {i} for i in everybody]
    found = group(ids, reach)
    for i in everybody:
        assert found[found[i]] == found[i] <= i  # a host is named by its first process
        for j in everybody:
            if found[i] == found[j]:
                assert ids[i] == ids[j] and j in reach[i] and i in reach[j]
    if all(len(r) == len(ids) for r in reach):
        assert [ids[host] for host in found] == ids
        assert len({*found}) == len({*ids})


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_hosts_are_all_linked(placed) -> None:
    first = [placed.index(host) for host in placed]
    everybody = Processes(tuple((rank,) for rank in range(len(placed))), tuple(first))
    chain = [(a, a + 1) for a in range(len(placed) - 1) if placed[a] != placed[a + 1]]
    linked = everybody.linked(chain)
    assert linked == sorted(linked)
    leaders = sorted({*first})
    assert {*linked} == {*chain} | {(a, b) for a in leaders for b in leaders if a < b}
    for pair in chain:
        assert everybody.transport(pair, (), False) == "tcp"


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(*[st.integers(0, 10**6)] * 3), min_size=1, max_size=64),
)
def test_a_clock_is_known_to_half_a_round_trip(offset, trips) -> None:
    """`offset`: of the peer's clock; a trip there, an answer that takes a while, the way back."""
    clock, now = Clock(), 10**15
    assert clock.offset == 0
    for out, pause, back in trips:
        sent, heard = now, now + out + pause + back
        clock.hear(sent + out + pause + offset, sent, sent + out + offset, heard)
        now = heard
    assert abs(clock.offset - offset) <= min(out + back for out, _, back in trips) / 2 + 1


_SHIFT = 10**15  # some eleven days, in ns


class _ShiftedTime:
    """What link.py sees of `time` on a host whose clock is ahead."""

    def __init__(self) -> None:
        self.monotonic = time.monotonic

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + _SHIFT


def _clock_of(world: Any) -> tuple[float, float]:
    """Seconds to add to this host's clock, as known before the first beat."""
    os.environ["ZBPIPE_HOST"] = str(world.rank)
    if world.rank == 1:
        link.time = _ShiftedTime()
    began = time.monotonic()
    crew = crew_of(world, compile(build("1f1b", 2, 2)))
    found, took = crew.clock, time.monotonic() - began
    crew.close()
    return found, took


def test_clocks_of_hosts_are_compared_before_anything_runs() -> None:
    (lead, _), (other, took) = [outcome.get() for outcome in forked(_clock_of, 2)]
    assert lead == 0
    # No round trip took longer than all of them.
    assert abs(other + _SHIFT / 1e9) <= took


def test_what_another_process_holds_is_only_looked_at() -> None:
    probe = hosts.Probe()
    _, fd, secret = probe.address
    assert hosts.reachable(probe.address)
    assert not hosts.reachable((2**22, fd, secret))  # more than the greatest pid there is
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    assert hosts.reachable((child, fd, secret))
    assert not hosts.reachable((child, fd, b"x" * 16))
    assert not hosts.reachable((child, read, secret))
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)
    probe.close()


@pytest.mark.parametrize("how", ["ends_without_close", "ends_after_an_error"])
def test_a_process_ends_with_its_links_open(tmp_path, how) -> None:
    ranks = []
    for rank in (0, 1):
        command = [sys.executable, WORKER, how, str(rank), "2", str(tmp_path / "store")]
        settings = {"ZBPIPE_HOST": str(rank), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ranks.append(
            subprocess.Popen(
                [*command, str(tmp_path / f"{rank}.json")],
                env=os.environ | settings,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [rank.communicate(timeout=_HANG_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    if how == "ends_without_close":
        assert results == [{}, {}]
        assert [text for text in said if "Traceback" in text or "terminate" in text] == []
    else:
        assert all("differs" in result["message"] for result in results), results
