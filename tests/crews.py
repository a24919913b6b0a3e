"""Ranks to test the executor with, forked or spawned, and callbacks that check messages."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from zbpipe.errors import StageError, ZbpipeError
from zbpipe.program import Programs
from zbpipe.runtime.executor import Crew, Loaded
from zbpipe.runtime.world import World, spawn
from zbpipe.schedule.core import Action

# Hang guard of the helpers below; nothing is measured against it.
_HANG_S = 90

_TABLE = np.random.default_rng(0).integers(0, 255, 4 << 20, dtype=np.uint8)


@dataclass(frozen=True)
class PipeWorld(World):
    """A World over pipes, so that forked ranks need no torch.distributed to meet."""

    peers: tuple[tuple[Connection, Connection] | None, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        for peer in self.peers:
            if peer is not None:
                peer[1].send(value)
        return [value if peer is None else peer[0].recv() for peer in self.peers]


def crew_of(world: World, programs: Programs, timeout: float = 30.0, poison: bool = True) -> Crew:
    crew = Crew(world, timeout, poison)
    crew.connect(programs.slots)
    return crew


def local(programs: Programs, timeout: float = 30.0, poison: bool = True) -> tuple[Crew, Loaded]:
    """All ranks in this process."""
    ranks = len(programs.ranks)
    crew = crew_of(World(ranks, tuple(range(ranks))), programs, timeout, poison)
    return crew, crew.load(programs)


class Relay:
    """One rank's callback: what it receives must be what was sent; what it sends is random.

    Payloads, headers and sizes follow from (seed, run, action), so that both ends know them.
    """

    def __init__(self, crew: Crew, loaded: Loaded, rank: int, seed: int, largest: int) -> None:
        self.program = loaded.programs[rank]
        self.executor = crew.executors[rank]
        self.seed, self.largest = seed, largest
        self.run = 0
        self.order: list[Any] = []
        self._sending: dict[int, np.ndarray] = {}

    def begin(self, run: int) -> Relay:
        self.run, self.order = run, []
        return self

    def __call__(self, index: int) -> None:
        program = self.program
        self.order.append(program.instructions[index].action)
        self._sending = {
            i: held for i, held in self._sending.items() if not self.executor.finished(i)
        }
        need = program.needs.get(index)
        if need is not None:
            self._check(program.instructions[need])
        send = program.sends.get(index)
        if send is not None:
            header, payload, cut = self._message(program.instructions[index].action)
            at = payload.ctypes.data
            pieces = [(at, cut, 0), (at + cut, payload.size - cut, cut)] if payload.size else []
            self.executor.post(send, header, pieces, payload.size)
            self._sending[send] = payload

    def _check(self, receive: Any) -> None:
        header, slot = self.executor.message(receive.channel, receive.slot)
        wanted, payload, _ = self._message(receive.action)
        assert header == wanted, f"{receive.action}: header {header!r}, want {wanted!r}"
        held = np.frombuffer(slot, dtype=np.uint8)
        assert np.array_equal(held, payload), f"{receive.action}: payload differs"

    def _message(self, action: Any) -> tuple[bytes, np.ndarray, int]:
        key = [self.seed, self.run, action.stage, "FIWB".index(action.kind), action.microbatch]
        random = np.random.default_rng(key)
        edges = [0, 1, 63, 64, 65, 4096, 65_537, self.largest]
        size = int(random.choice([*edges, random.integers(self.largest + 1)]))
        offset = int(random.integers(_TABLE.size - self.largest + 1))
        header = repr(key).encode() * int(random.integers(1, 9))
        return header, _TABLE[offset : offset + size].copy(), int(random.integers(size + 1))


@dataclass
class Outcome:
    """What became of a rank: what its function returned or raised, or its exit code."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None

    def get(self) -> Any:
        """The value; raises where there is none."""
        if self.error is not None or self.exitcode != 0:
            raise AssertionError(f"rank {self.rank}, exit code {self.exitcode}:\n{self.trace}")
        return self.value


@dataclass
class _Forked:
    process: Any
    result: Connection
    outcome: Outcome = field(default_factory=lambda: Outcome(-1))


def forked(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Outcome]:
    """Run `fn(world, *args)` in `ranks` forked processes; an Outcome a rank, however it ended."""
    context = multiprocessing.get_context("fork")
    mesh = [[context.Pipe(duplex=False) for _ in range(ranks)] for _ in range(ranks)]
    running = []
    for rank in range(ranks):
        peers = tuple(
            None if q == rank else (mesh[q][rank][0], mesh[rank][q][1]) for q in range(ranks)
        )
        world = PipeWorld(ranks, (rank,), None, peers)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, fn, world, args))
        process.start()
        theirs.close()
        running.append(_Forked(process, ours, Outcome(rank)))
    for ends in mesh:
        for receive, send in ends:
            receive.close()
            send.close()
    try:
        for one in running:
            _finish(one)
    finally:
        for one in running:
            if one.process.is_alive():
                one.process.kill()
            one.process.join()
    return [one.outcome for one in running]


def _finish(one: _Forked) -> None:
    outcome = one.outcome
    if not wait([one.result, one.process.sentinel], _HANG_S):
        raise AssertionError(f"rank {outcome.rank} hangs")
    if one.result.poll():
        try:
            outcome.value, outcome.error, outcome.trace = one.result.recv()
        except EOFError:
            outcome.trace = "the process ended without a result"
    one.process.join(_HANG_S)
    if one.process.is_alive():
        raise AssertionError(f"rank {outcome.rank} has returned but does not exit")
    outcome.exitcode = one.process.exitcode


def _child(result: Connection, fn: Callable[..., Any], world: PipeWorld, args: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = (fn(world, *args), None, "")
    except BaseException as error:
        answer = (None, _portable(error), traceback.format_exc())
    result.send(answer)


def _portable(error: BaseException) -> BaseException:
    """zbpipe's errors and Ctrl-C as they are; any other by its text."""
    if isinstance(error, (ZbpipeError, KeyboardInterrupt)):
        return pickle.loads(pickle.dumps(error))
    return RuntimeError(repr(error))


def spawned(fn: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run `fn(rank, *args)` in processes of zbpipe.runtime.world.spawn; raises what one raised."""
    context = spawn(fn, ranks, args)
    waited = 0.0
    while not context.join(timeout=0.5):
        waited += 0.5
        if waited > _HANG_S:
            for process in context.processes:
                process.kill()
            raise AssertionError("the spawned ranks hang")


def lane_threads() -> list[str]:
    """Names of this process's threads that are lanes."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
        except OSError:  # the thread ended while we looked
            continue
    return [name for name in names if name.startswith("zb-lane")]


def shared_files() -> list[str]:
    """Descriptors of this process that are memory shared between ranks."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the listing's own descriptor
            continue
    return [path for path in found if "zbpipe" in path]


def process_state(pid: int) -> str:
    """The letter of proc_pid_stat(5): R, S, T, Z, ...; "" where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def named(error: BaseException | None, rank: int, action: Action | None, cause: str) -> None:
    """`error` is a StageError of `rank` in `action`, and says `cause`."""
    assert type(error) is StageError, error
    assert (error.rank, cause in error.cause) == (rank, True), error
    where = None if action is None else (action.stage, action.kind, action.microbatch)
    given = (error.stage, error.action, error.microbatch)
    assert given == (where or (None, None, None)), error
