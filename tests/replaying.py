"""An independent replay of compiled Programs: random interleavings, and what lies in each slot."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from zbpipe.program import Instruction, Op, Programs
from zbpipe.schedule import build, forward_only
from zbpipe.schedule.core import SUMS, Action, Schedule


def v_schedule(ranks: int, microbatches: int) -> Schedule:
    """2 * ranks stages, stage s < p on rank s, else on rank 2p-1-s; every rank's order is valid.

    Actions are taken from the whole pipeline's dependency order, one microbatch after the other
    with a window of `ranks` microbatches between forward and backward.
    """
    stages = 2 * ranks
    placement = [s if s < ranks else stages - 1 - s for s in range(stages)]
    order: list[Action] = []
    for i in range(microbatches + ranks):
        if i < microbatches:
            order += [Action(s, "F", i) for s in range(stages)]
        if i >= ranks:
            order += [Action(s, "I", i - ranks) for s in reversed(range(stages))]
            order += [Action(s, "W", i - ranks) for s in range(stages)]
    rows = tuple(
        tuple(action for action in order if placement[action.stage] == rank)
        for rank in range(ranks)
    )
    return Schedule(rows, microbatches, tuple(placement), "v_by_hand")


def make(name: str, ranks: int, microbatches: int) -> Schedule:
    """A family's schedule, `forward_only`, or the V placement above (also only forward)."""
    if name == "forward_only":
        return forward_only(ranks, microbatches)
    if name in ("v", "v_forward_only"):
        schedule = v_schedule(ranks, microbatches)
        if name == "v":
            return schedule
        rows = tuple(tuple(a for a in row if a.kind != "W") for row in schedule.rows)
        return Schedule(rows, microbatches, schedule.placement, name)
    return build(name, ranks, microbatches)


def only_forward(name: str) -> bool:
    return name in ("forward_only", "v_forward_only")


class Slot:
    """A slot as its two ends see it; `content` is None while it is torn or let go of."""

    def __init__(self) -> None:
        self.content: Action | None = None
        self.sent = self.received = self.free = 0


class Replay:
    """Lanes advance in an order that `random` chooses; every action and transfer takes time.

    A sender writes as soon as its slot is free, and the slot is torn while it does; a receiver lets
    go as early as it may. So a reader that is still under way, or still to come, would notice.
    """

    def __init__(self, schedule: Schedule, programs: Programs, random: Random) -> None:
        self.schedule, self.programs, self.random = schedule, programs.ranks, random
        self.forward_only = programs.forward_only
        self.lanes = {
            (program.rank, lane): [
                i for i, entry in enumerate(program.instructions) if entry.lane == lane
            ]
            for program in self.programs
            for lane in range(len(program.lanes))
        }
        self.under_way: set[tuple[int, int]] = set()
        self.done: set[tuple[int, int]] = set()
        self.slots = {pair: [Slot() for _ in range(n)] for pair, n in programs.slots.items()}
        self.got: dict[tuple[int, Action], Slot] = {}  # received, by rank and what made it
        self.messages = {
            (program.rank, entry.action)
            for program in self.programs
            for entry in program.instructions
            if entry.op == Op.RECEIVE
        }

    def run(self) -> None:
        """To the end; AssertionError where a slot does not hold what a reader wants."""
        while keys := [key for key, queue in self.lanes.items() if queue]:
            ready = [key for key in keys if self._ready(key)]
            assert ready, "the lanes are stuck"
            key = self.random.choice(ready)
            rank, index = key[0], self.lanes[key][0]
            entry = self.programs[rank].instructions[index]
            if key not in self.under_way:
                self.under_way.add(key)
                self._start(rank, entry)
            else:
                self.under_way.remove(key)
                self._finish(rank, entry)
                self.done.add((rank, index))
                del self.lanes[key][0]

    def _slot(self, rank: int, entry: Instruction) -> Slot:
        program = self.programs[rank]
        if entry.op == Op.SEND:
            return self.slots[rank, program.destinations[entry.channel]][entry.slot]
        return self.slots[program.sources[entry.channel], rank][entry.slot]

    def _ready(self, key: tuple[int, int]) -> bool:
        rank, index = key[0], self.lanes[key][0]
        entry = self.programs[rank].instructions[index]
        if not all((rank, w) in self.done for w in entry.waits):
            return False
        if entry.op == Op.SEND and key not in self.under_way:
            slot = self._slot(rank, entry)
            return slot.free == slot.sent
        if entry.op == Op.RECEIVE and key in self.under_way:
            slot = self._slot(rank, entry)
            return slot.sent > slot.received
        return True

    def _start(self, rank: int, entry: Instruction) -> None:
        if entry.op != Op.RECEIVE:
            self._read(rank, entry.action)
        if entry.op == Op.CALLBACK:
            return
        slot = self._slot(rank, entry)
        if entry.op == Op.SEND or slot.free < slot.received:
            slot.content = None
        if entry.op == Op.RECEIVE:
            slot.free = slot.received

    def _finish(self, rank: int, entry: Instruction) -> None:
        if entry.op != Op.RECEIVE:
            self._read(rank, entry.action)
        if entry.op == Op.SEND:
            slot = self._slot(rank, entry)
            slot.content = entry.action
            slot.sent += 1
        elif entry.op == Op.RECEIVE:
            slot = self._slot(rank, entry)
            assert slot.content == entry.action, f"{entry.action} comes as {slot.content}"
            slot.received += 1
            self.got[rank, entry.action] = slot

    def _read(self, rank: int, action: Action) -> None:
        """`action` (or the send of its result) reads all that its rank received for it."""
        for made_by in self.reads(rank, action):
            if (rank, made_by) in self.messages:
                assert (rank, made_by) in self.got, f"rank {rank}: {action} before {made_by} is in"
                content = self.got[rank, made_by].content
                assert content == made_by, f"rank {rank}: {action} finds {content}, not {made_by}"

    def reads(self, rank: int, action: Action) -> Iterator[Action]:
        """What made the messages that may lie under what `action` uses.

        Its own stage's and, since a stage may hand on what it received, those of all stages of
        the rank that lie before it: forwards for F; both directions for a backward.
        """
        stage, kind, mb = action
        if kind in SUMS:
            if kind == "S":
                yield Action(self.schedule.stages - 1 - stage, "R", 0)
            return
        for s in self._linked(stage, rank, -1):
            if s > 0 and (kind == "F" or not self.forward_only):
                yield Action(s - 1, "F", mb)
        if kind != "F":
            for s in self._linked(stage, rank, +1):
                if s + 1 < self.schedule.stages:
                    yield from (Action(s + 1, "I", mb), Action(s + 1, "B", mb))

    def _linked(self, stage: int, rank: int, step: int) -> Iterator[int]:
        """`stage` and its neighbours in one direction for as long as they are on `rank`."""
        while 0 <= stage < self.schedule.stages and self.schedule.placement[stage] == rank:
            yield stage
            stage += step
