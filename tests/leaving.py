"""Ways to leave a process that has run a pipeline; each in a process of its own that really ends.

`python leaving.py NAME...` forks one process a NAME, which runs to its interpreter's end, and
prints {NAME: [exit code, what it wrote to stderr]} as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from crews import Relay, lane_threads, local, shared_files
from zbpipe.errors import StageError, ZbpipeError
from zbpipe.program import compile
from zbpipe.schedule import build

PROGRAMS = compile(build("zb_h1", 2, 4))


def ran(runs: int = 3, timeout: float = 30.0):
    crew, loaded = local(PROGRAMS, timeout)
    for run in range(runs):
        crew.run(loaded, {r: Relay(crew, loaded, r, 0, 5000).begin(run) for r in (0, 1)})
    assert lane_threads()
    assert shared_files()
    return crew, loaded


def again(crew, loaded) -> None:
    crew.run(loaded, {r: Relay(crew, loaded, r, 1, 5000).begin(0) for r in (0, 1)})


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def closed() -> None:
    crew, loaded = ran()
    crew.close()
    assert lane_threads() == shared_files() == []
    try:
        again(crew, loaded)
    except ZbpipeError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError("a closed crew ran")


def not_closed() -> None:
    KEPT.append(ran())


def collected() -> None:
    ran()
    gc.collect()
    assert lane_threads() == shared_files() == []


def aborted(close: bool = False) -> None:
    crew, loaded = ran()

    def boom(index: int) -> None:
        raise ValueError("boom")

    relay = Relay(crew, loaded, 0, 0, 5000).begin(0)
    try:
        crew.run(loaded, {0: relay, 1: boom})
    except StageError as error:
        assert error.rank == 1
    else:
        raise AssertionError("no error")
    if close:
        crew.close()
        assert lane_threads() == shared_files() == []
    KEPT.append(crew)


def aborted_and_closed() -> None:
    aborted(close=True)


def _stalled(body) -> None:
    crew, loaded = ran(timeout=1.0)
    try:
        crew.run(loaded, {0: lambda index: None, 1: lambda index: body()})
    except StageError as error:
        assert (error.rank, error.stage, error.action, error.microbatch) == (1, 1, "F", 0)
    else:
        raise AssertionError("no error")
    KEPT.append(crew)


def stalled_asleep() -> None:
    _stalled(lambda: time.sleep(3600))


def stalled_and_closed() -> None:
    _stalled(lambda: time.sleep(3600))
    KEPT[-1].close()


def stalled_in_python() -> None:
    def body() -> None:
        while True:
            time.sleep(0.0005)

    _stalled(body)


def stalled_in_torch() -> None:
    a = torch.ones(64, 64)

    def body() -> None:
        while True:
            a @ a

    _stalled(body)


def wakes_at_the_end() -> None:
    """Native code that returns, deaf to exceptions, while the interpreter is ending."""
    ending = threading.Lock()
    ending.acquire()
    _stalled(ending.acquire)
    sys.modules["zbpipe_ending"] = Ending(ending)  # type: ignore[assignment]


class Ending:
    """Lets the lane go on when modules are torn down, and keeps the interpreter there a moment."""

    def __init__(self, lock: threading.Lock) -> None:
        self._release, self._sleep = lock.release, time.sleep

    def __del__(self) -> None:
        self._release()
        self._sleep(0.3)


def _child(fn) -> int:
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = fn()
        finally:
            os._exit(code)
    return exit_code(pid)


def forks() -> None:
    """Children of a process with lanes: they end in any way, and the pipeline goes on."""
    crew, loaded = ran()

    def plain() -> int:
        return 5

    def uses() -> int:
        try:
            again(crew, loaded)
        except ZbpipeError as error:
            crew.fail(0, error)  # a child's errors are its own
            return 6 if "forked" in str(error) else 71
        return 72

    def closes() -> int:
        crew.close()
        again_closed = threading.active_count()
        return 7 if again_closed == 1 else 73

    def collects() -> int:
        nonlocal crew, loaded
        crew = loaded = None
        gc.collect()
        return 8 if shared_files() == [] else 74

    codes = []
    for fn in (plain, uses, closes, collects):
        codes.append(_child(fn))
        again(crew, loaded)
    assert codes == [5, 6, 7, 8], codes
    assert crew.board.failure() is None
    # And one that ends as an interpreter does, with the crew still there.
    pid = os.fork()
    if pid == 0:
        sys.exit(9)
    assert exit_code(pid) == 9
    again(crew, loaded)
    crew.close()


def loads_data() -> None:
    crew, loaded = ran()
    loader = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=5, num_workers=2)
    for _ in range(2):
        total = 0.0
        for (batch,) in loader:
            total += float(batch.sum())
            again(crew, loaded)
        assert total == 780.0
    crew.close()
    assert lane_threads() == shared_files() == []


KEPT: list = []
SCENARIOS = {
    fn.__name__: fn
    for fn in (
        closed,
        not_closed,
        collected,
        aborted,
        aborted_and_closed,
        stalled_asleep,
        stalled_and_closed,
        stalled_in_python,
        stalled_in_torch,
        wakes_at_the_end,
        forks,
        loads_data,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    running = {}
    for name in sys.argv[1:]:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - both processes use it
        pid = os.fork()
        if pid == 0:
            os.dup2(errors.fileno(), 2)
            SCENARIOS[name]()
            sys.exit(0)
        running[name] = (pid, errors)
    answers = {}
    for name, (pid, errors) in running.items():
        code = exit_code(pid)
        errors.seek(0)
        answers[name] = [code, errors.read().decode(errors="replace")]
    print(json.dumps(answers))
