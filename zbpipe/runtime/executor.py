"""The Python face of the native executor: connects this process's ranks and runs Programs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

from .. import _native
from ..errors import ConfigError, ZbpipeError
from ..program import Op, Program, Programs
from ..timeline import Span, Timeline
from . import control
from .device_links import DeviceLinks, check_queues
from .hosts import BRIDGED, Pair
from .meeting import Meeting, meet
from .world import World

# After an abort, how long step() waits for callbacks that are under way before it raises. They keep
# running: what they touch is poisoned with the pipe.
_GRACE_NS = 2_000_000_000

Callback = Callable[[int], None]


class Crew:
    """The executors of the ranks that this process drives, and their channels to all others.

    Everything here lives until `close`, which also runs at interpreter exit: threads are joined
    (one that is stuck in user code is left behind) and shared memory goes with its last owner.
    """

    def __init__(
        self,
        world: World,
        timeout: float,
        poison: bool = False,
        devices: Mapping[int, int] | None = None,
        forced: Mapping[Pair, str] | None = None,
    ) -> None:
        """Collective. `devices`: the CUDA device of each rank of this process; None for the CPU.

        With it `cuda[rank]` is the native device: `cuda[rank].after(stream)` makes the next run
        begin after what is in a stream now, `executors[rank].stream(lane)` is a lane's stream.
        `forced`: "tcp", "torch" or "nccl" for (from, to) pairs of ranks, even on one host.
        """
        self.world = world
        self._poison = poison
        self._forced = dict(forced or {})
        self._pid = os.getpid()
        if devices is not None and {*devices} != {*world.local}:
            raise ConfigError(
                f"devices = {dict(devices)}: want a CUDA device for each of the ranks {world.local}"
            )
        self._meeting = meet(world, devices is not None)
        self.board = self._meeting.board
        self.cuda = {
            rank: _native.cuda.Device(self.board, rank, device)
            for rank, device in (devices or {}).items()
        }
        self._links = DeviceLinks(self.board, self.cuda, devices or {}, poison)
        self._timeout = timeout
        self.executors = {
            rank: _native.Executor(self.board, rank, timeout, self.cuda.get(rank))
            for rank in world.local
        }
        self._slots: dict[Pair, int] = {}
        self._errors: dict[int, BaseException] = {}
        self.close = weakref.finalize(self, _stop, tuple(self.executors.values()), self._meeting)
        Finalize(self, self.close, exitpriority=0)  # where multiprocessing ends it, not atexit
        # Everybody has the board open before rank 0's process may go.
        world.gather(None)
        self.board.seal()

    def connect(self, slots: Mapping[Pair, int]) -> None:
        """Open a channel for each (from, to) pair of ranks. Collective; once a crew.

        Channels are numbered as in Program: a rank's outgoing ones by destination, its incoming
        ones by source. Raises ConfigError on every rank where two ranks cannot be connected.
        """
        self._slots = dict(slots)
        where = {pair: self._transport(pair) for pair in slots}
        self._check_transports(where)
        # Headers, and on the CPU all of a message, go over a link where no memory is shared.
        processes = self._meeting.processes
        apart = {pair for pair in slots if processes.apart(pair, where[pair])}
        bridged = {pair for pair in apart if where[pair] in BRIDGED}
        mailed = {pair for pair in apart if where[pair] == "torch"}
        staged = sorted(bridged) if self.cuda else []
        self._meeting.connect(sorted(apart), self._timeout, sorted(mailed), staged)
        parts = self.world.agree(lambda: self._offer(where, apart), "making channels")
        everywhere = {pair: at for part in parts for pair, at in part.items()}

        def accept() -> None:
            try:
                self._accept(where, apart, everywhere)
            except Exception as error:
                self.fail(self.world.rank, error)  # the others look for this while they wait
                raise

        # Nobody may leave before its channels have been opened.
        self.world.agree(accept, "opening channels")

    def _offer(self, where: Mapping[Pair, str], apart: Collection[Pair]) -> dict[Pair, Any]:
        """Make the sending ends of this process; where the receivers find them."""
        check_queues(where)
        made: dict[Pair, tuple[int, int, Any]] = {}
        for pair, count in sorted(self._slots.items()):
            if pair[0] in self.executors:
                sender, offered = _native.Sender(count), None
                self.executors[pair[0]].add_sender(sender)
                if pair[0] in self.cuda:
                    offered = self._links.offer(pair, count, where[pair])
                if pair in apart:
                    self._meeting.carry_off(pair, sender)
                if pair in self._links.departures:
                    self._meeting.carry_payloads(pair, self._links.departures.pop(pair))
                made[pair] = (os.getpid(), sender.fd, offered)
        return made

    def _accept(
        self, where: Mapping[Pair, str], apart: Collection[Pair], found: Mapping[Pair, Any]
    ) -> None:
        """Open the receiving ends of this process, and wait until all ends are connected."""
        for pair, count in sorted(self._slots.items(), key=lambda item: item[0][::-1]):
            if pair[1] in self.executors:
                pid, fd, offered = found[pair]
                if pair in apart:
                    pid, fd = os.getpid(), self._meeting.bring(pair, count).fd
                on_host = self._poison and pair[1] not in self.cuda
                self.executors[pair[1]].add_receiver(_native.Receiver(pid, fd, count, on_host))
                if pair[1] in self.cuda:
                    self._links.accept(pair, count, where[pair], pid, offered)
                if pair in self._links.arrivals:
                    self._meeting.bring_payloads(pair, self._links.arrivals.pop(pair))
        self._meeting.start()
        self._links.connect(self._timeout, self.raise_failure)

    def _check_transports(self, where: Mapping[Pair, str]) -> None:
        for (a, b), name in where.items():
            if name == "nccl" and not self.cuda:
                want = " or ".join(map(repr, BRIDGED))
                raise ConfigError(
                    f"transport of rank {a} → {b} = {name!r}: the ranks are on the CPU, want {want}"
                )

    def _transport(self, pair: Pair) -> str:
        return self._meeting.processes.transport(pair, self._forced, bool(self.cuda))

    def transports(self) -> dict[Pair, str]:
        """The transport of each channel that starts or ends here."""
        own = self.executors
        return {
            pair: self._transport(pair) for pair in self._slots if pair[0] in own or pair[1] in own
        }

    def load(self, programs: Programs) -> Loaded:
        """Make the Programs of this process's ranks ready for `run`.

        They may use fewer channels than were connected.
        """
        own = {
            rank: programs.ranks[rank].renumbered(
                sorted(b for a, b in self._slots if a == rank),
                sorted(a for a, b in self._slots if b == rank),
            )
            for rank in self.executors
        }
        return Loaded(own, {rank: _native_program(program) for rank, program in own.items()})

    def run(self, loaded: Loaded, callbacks: Mapping[int, Callback | None]) -> None:
        """Run one Program a rank to its end; `callbacks[rank](instruction)` does the actions.

        Raises StageError or ConfigError, the same on every rank, if any rank of the host failed;
        KeyboardInterrupt if it came here. The crew cannot run again after that. ZbpipeError where
        the crew was closed, or in a process forked from the one that made it.
        """
        self.raise_failure()
        if not self.close.alive:
            raise ZbpipeError("this pipeline was closed: wrap the model again")
        if os.getpid() != self._pid:
            raise ZbpipeError("this process was forked from the pipeline's: step() belongs there")
        jobs = [
            (executor, loaded.native[rank], self._guard(loaded.programs[rank], callbacks[rank]))
            for rank, executor in self.executors.items()
        ]
        if not _native.run(self.board, self.world.rank, jobs, _GRACE_NS):
            self.raise_failure()

    def _guard(self, program: Program, callback: Callback | None) -> Callable[[int], bool] | None:
        if callback is None:
            return None

        def guarded(index: int) -> bool:
            try:
                callback(index)
            except BaseException as error:  # whatever user code raises must reach every rank
                self._errors.setdefault(program.rank, error)
                self.fail(program.rank, error, program.instructions[index].action)
                return False
            return True

        return guarded

    def fail(self, rank: int, error: BaseException, action: Any = None) -> None:
        """Tell every rank that `rank` failed with `error`."""
        control.abort(self.board, rank, error, action)

    def raise_failure(self) -> None:
        """Raise what made the board abort; nothing where it has not."""
        failure = self.board.failure()
        if failure is not None:
            raise control.error_of(failure) from self._errors.get(failure[0])

    @property
    def clock(self) -> float:
        """Seconds to add to this host's monotonic clock for that of rank 0's host."""
        return float(self.board.clock) / 1e9

    def timeline(self, loaded: Loaded, kind: str = "measured") -> Timeline:
        """What this process's ranks did in the last run, seconds of rank 0's host's clock.

        Messages are received in place: a receive is the moment of the arrival, not the wait for it.
        """
        spans = []
        clock = self.clock
        for rank, program in loaded.programs.items():
            times = self.executors[rank].times()
            for instruction, (start, end) in zip(program.instructions, times, strict=True):
                lane = program.lanes[instruction.lane]
                start = end if instruction.op == Op.RECEIVE else start
                at = (start / 1e9 + clock, end / 1e9 + clock)
                spans.append(Span(rank, lane, instruction.action, *at))
        return Timeline(tuple(spans), self.world.size, kind=kind)


@dataclass(frozen=True)
class Loaded:
    """Programs of this process's ranks, and what the native executor holds of them."""

    programs: dict[int, Program]
    native: dict[int, Any]


def _native_program(program: Program) -> Any:
    rows = [
        (
            i.lane,
            int(i.op),
            i.channel,
            i.slot,
            i.amount,
            i.action.stage,
            i.action.kind,
            i.action.microbatch,
            list(i.waits),
            i.signals,
        )
        for i in program.instructions
    ]
    return _native.Program(len(program.lanes), rows)


def _stop(executors: tuple[Any, ...], meeting: Meeting) -> None:
    for executor in executors:
        executor.stop()
    meeting.close()  # last: what was sent is still carried off
