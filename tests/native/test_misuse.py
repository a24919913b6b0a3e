"""Programs and processes that are not what they seem: the native face checks and does not crash."""

from __future__ import annotations

import mmap
import os

import pytest

from crews import local, named
from zbpipe import _native
from zbpipe.errors import StageError
from zbpipe.program import Op, Programs, compile
from zbpipe.schedule import build
from zbpipe.schedule.core import Action


def rows_of(programs: Programs, rank: int, change=lambda entry: {}):
    program = programs.ranks[rank]
    rows = []
    for e in program.instructions:
        new = {"slot": e.slot, "channel": e.channel} | change(e)
        tail = (e.action.stage, e.action.kind, e.action.microbatch, list(e.waits), e.signals)
        rows.append((e.lane, int(e.op), new["channel"], new["slot"], 0, *tail))
    return _native.Program(len(program.lanes), rows)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        (Op.SEND, {"slot": 99}),
        (Op.SEND, {"channel": 7}),
        (Op.RECEIVE, {"slot": -1}),
        (Op.RECEIVE, {"channel": -1}),
    ],
)
def test_a_program_that_cannot_start_is_an_error_for_all_its_ranks(op, change):
    programs = compile(build("1f1b", 2, 3))
    crew, loaded = local(programs)
    bad = rows_of(programs, 1, lambda entry: change if entry.op == op else {})
    jobs = [
        (crew.executors[0], loaded.native[0], lambda index: True),
        (crew.executors[1], bad, lambda index: True),
    ]
    with pytest.raises(RuntimeError, match="channel or a slot that is not there"):
        _native.run(crew.board, 0, jobs, 10**9)
    # Rank 0 was under way already: it has ended, and cannot start again.
    with pytest.raises(StageError, match="channel or a slot"):
        crew.run(loaded, {0: None, 1: None})
    crew.close()


def test_malformed_programs_are_refused():
    with pytest.raises(RuntimeError, match="names a lane"):
        _native.Program(1, [(1, 0, -1, -1, 0, 0, "F", 0, [], False)])
    with pytest.raises(RuntimeError, match="does not signal"):
        rows = [(0, 0, -1, -1, 0, 0, "F", 0, [], False), (1, 0, -1, -1, 0, 0, "F", 0, [0], False)]
        _native.Program(2, rows)
    with pytest.raises(RuntimeError, match="one that is not there"):
        _native.Program(1, [(0, 0, -1, -1, 0, 0, "F", 0, [5], False)])


def test_a_callback_that_fails_without_a_word_is_an_error():
    crew, loaded = local(compile(build("1f1b", 2, 3)))
    jobs = [
        (crew.executors[r], loaded.native[r], lambda index, r=r: (r, index) != (1, 0))
        for r in range(2)
    ]
    assert _native.run(crew.board, 0, jobs, 10**9) is False
    with pytest.raises(StageError) as caught:
        crew.raise_failure()
    named(caught.value, 1, Action(1, "F", 0), "did not say why")
    crew.close()


def test_a_pid_that_another_process_has_now_is_a_dead_rank():
    programs = compile(build("1f1b", 2, 2))
    board = _native.Board.create(2)
    fd, here = os.dup(board.fd), os.getpid()
    child = os.fork()
    if child == 0:
        kept = _native.Executor(_native.Board.open(here, fd, 2), 1, 30.0)
        os._exit(kept is None)
    os.waitpid(child, 0)
    with mmap.mmap(fd, 0) as memory:
        at = memory.find(child.to_bytes(4, "little"))
        memory[at : at + 4] = os.getppid().to_bytes(4, "little")
    os.close(fd)
    executor = _native.Executor(board, 0, 30.0)
    executor.add_sender(_native.Sender(programs.slots[0, 1]))
    sender = _native.Sender(programs.slots[1, 0])
    executor.add_receiver(_native.Receiver(here, sender.fd, programs.slots[1, 0]))
    job = (executor, rows_of(programs, 0), lambda index: True)
    assert _native.run(board, 0, [job], 10**9) is False
    assert board.failure() == (1, -1, "-", -1, "d", "the process of this rank died")
    executor.stop()


def test_a_failure_whose_writer_was_killed_still_names_its_rank():
    board = _native.Board.create(4)
    fd = os.dup(board.fd)
    with mmap.mmap(fd, 0) as memory:
        memory[0:4] = (2 + 3).to_bytes(4, "little")  # rank 3 had begun to write
    os.close(fd)
    rank, stage, _, _, cause, message = board.failure()
    assert (rank, stage, cause) == (3, -1, "d")
    assert "died" in message
