"""Program: one rank's instructions, compiled from a Schedule. All thinking is done here.

A rank has a compute lane and, for each rank it talks to, a lane to send and one to receive:

    compute   F0 ──────── F1 ──────── I0 ──── W0 ...
                │  ▲                  ▲
    send:1      └▶ 0F0 ─▶ ...         │        a send waits for the action that makes its message
    recv:1                     1I0 ───┘        an action waits for the message it needs

A lane is first in, first out; lanes are ordered among each other by `waits` alone. A message lies
in a slot of its channel (sending rank → receiving rank) from its receive to its last reader: the
action that lets go of it (W, since the first layer may stash its input, or the last W of its run)
and every send of a tensor that may alias it. Slots are coloured by that lifetime, so there are as
many as there is work in flight, and a few more so that messages arrive ahead of time.

Parameters that the first and the last stage share have a gradient on either. It is handed over (R)
as soon as the stage's last weight gradient is in, and summed with the other end's (S), in a lane of
its own beside what the ranks still compute:

    compute   ... W(m-1) ──── other stages' actions
                    │
    tied            R ─▶ send        recv ─▶ S
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from .errors import ScheduleError
from .flow import Flow, Message
from .schedule.core import Action, Schedule

# Messages that may wait, received, before their reader's turn. One hides a hop's latency, the
# second the copy of the next message where it takes longer than an action.
PREFETCH = 2


class Op(IntEnum):
    """What an instruction does; the numbers are those of csrc/program.hpp."""

    CALLBACK = 0
    SLEEP = 1
    SEND = 2
    RECEIVE = 3


@dataclass(frozen=True)
class Instruction:
    """One entry of a lane.

    `action` is the compute action, or for a transfer the one that made the message. `channel`
    counts the rank's outgoing (SEND) or incoming (RECEIVE) channels. `amount`: nanoseconds of a
    SLEEP, bytes of a SEND that nobody posts a message for. `waits`: instructions of other lanes.
    """

    lane: int
    op: Op
    action: Action
    channel: int = -1
    slot: int = -1
    amount: int = 0
    waits: tuple[int, ...] = ()
    signals: bool = False


@dataclass(frozen=True)
class Program:
    """One rank's instructions. `lanes[0]` is "compute".

    `destinations`, `sources`: the peer of each outgoing and incoming channel.
    `sends[instruction]`, `needs[instruction]`: for a compute instruction, the SEND that carries its
    result and the RECEIVE that brings its input, where it has them.
    `together[instruction]`: for the W's of a run (Schedule.runs), the microbatches that may be
    computed there: all of the run at its last W, none at those before, which are held until then.
    """

    rank: int
    lanes: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    destinations: tuple[int, ...]
    sources: tuple[int, ...]
    sends: dict[int, int]
    needs: dict[int, int]
    together: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def renumbered(self, destinations: Sequence[int], sources: Sequence[int]) -> Program:
        """The same Program for a rank with channels to and from these peers, its own among them."""
        number = {Op.SEND: destinations, Op.RECEIVE: sources}
        peers = {Op.SEND: self.destinations, Op.RECEIVE: self.sources}
        rows = tuple(
            replace(i, channel=number[i.op].index(peers[i.op][i.channel])) if i.op in number else i
            for i in self.instructions
        )
        return replace(
            self, instructions=rows, destinations=tuple(destinations), sources=tuple(sources)
        )


@dataclass(frozen=True)
class Programs:
    """What `compile` makes of one Schedule: a Program a rank and the slots of each channel."""

    ranks: tuple[Program, ...]
    slots: dict[tuple[int, int], int]
    forward_only: bool = False


def compile(
    schedule: Schedule,
    *,
    forward_only: bool = False,
    tied: bool = False,
    prefetch: int = PREFETCH,
) -> Programs:
    """Compile a checked schedule, and prove by co-simulation that it cannot deadlock.

    `forward_only`: the schedule's I cells only pass the loss on (evaluation), so that nothing is
    kept after F. `tied`: the first and the last stage share parameters.
    Raises ScheduleError if the ranks would wait for each other in a circle, or if the schedule has
    several copies of the parameters (DualPipe), which the runtime does not keep.
    """
    if schedule.copies > 1:
        raise ScheduleError(
            f"{schedule.name or 'schedule'} keeps {schedule.copies} copies of the parameters: it "
            "can be planned, not run; dualpipe_v is its like with one copy"
        )
    flow = Flow(schedule, forward_only, tied)
    longest = max((len(messages) for messages in flow.channels.values()), default=0)
    while True:
        programs = _programs(flow, prefetch)
        try:
            cosimulate(programs)
        except ScheduleError:
            # A channel that carries activations and gradients is one queue: a message that comes
            # early may need a place although its turn is late. With a place each, it is the order.
            if prefetch >= longest:
                raise
            prefetch = min(2 * prefetch + 1, longest)
        else:
            return programs


def _programs(flow: Flow, prefetch: int) -> Programs:
    coloured = {pair: _colour(flow, pair, prefetch) for pair in flow.channels}
    ranks = range(flow.schedule.ranks)
    return Programs(
        ranks=tuple(_program(flow, rank, coloured) for rank in ranks),
        slots={pair: 1 + max(slot for slot, _ in rows) for pair, rows in coloured.items()},
        forward_only=flow.forward_only,
    )


def virtual(
    programs: Programs, duration: Callable[[Action], float], nbytes: Callable[[Action], float]
) -> Programs:
    """The same Programs with sleeps of `duration` seconds for actions and messages of `nbytes`."""

    def amount(instruction: Instruction) -> Instruction:
        if instruction.op == Op.CALLBACK:
            sleep = round(duration(instruction.action) * 1e9)
            return replace(instruction, op=Op.SLEEP, amount=sleep)
        if instruction.op == Op.SEND:
            return replace(instruction, amount=round(nbytes(instruction.action)))
        return instruction

    ranks = tuple(
        replace(program, instructions=tuple(map(amount, program.instructions)))
        for program in programs.ranks
    )
    return replace(programs, ranks=ranks)


def _colour(flow: Flow, pair: tuple[int, int], prefetch: int) -> list[tuple[int, int | None]]:
    """(slot, message that had the slot before) for each message of a channel, in order.

    A message must be in before the first reader of any later one, since the lane is a queue; it
    should be in `prefetch` messages earlier. It takes the slot that was let go of first.
    """
    messages = flow.channels[pair]
    wanted = [flow.place[message.first] for message in messages]
    for i in range(len(wanted) - 2, -1, -1):
        wanted[i] = min(wanted[i], wanted[i + 1])
    ends: list[int] = []
    owner: list[int] = []
    rows: list[tuple[int, int | None]] = []
    for i, message in enumerate(messages):
        birth = wanted[max(0, i - prefetch)] if i >= prefetch else -1
        end = max(flow.place[action] for action in message.last)
        slot = min(range(len(ends)), key=ends.__getitem__, default=None)
        if slot is None or ends[slot] >= birth:
            rows.append((len(ends), None))
            ends.append(end)
            owner.append(i)
        else:
            rows.append((slot, owner[slot]))
            ends[slot], owner[slot] = end, i
    return rows


def _program(
    flow: Flow, rank: int, coloured: dict[tuple[int, int], list[tuple[int, int | None]]]
) -> Program:
    row, sums = flow.schedule.rows[rank], flow.sums[rank]
    destinations = tuple(sorted(b for a, b in flow.channels if a == rank))
    sources = tuple(sorted(a for a, b in flow.channels if b == rank))
    outgoing = [("send", channel, (rank, q)) for channel, q in enumerate(destinations)]
    incoming = [("recv", channel, (q, rank)) for channel, q in enumerate(sources)]
    transfers = outgoing + incoming
    index = {("compute", action): i for i, action in enumerate((*row, *sums))}
    for way, _, pair in transfers:
        for message in flow.channels[pair]:
            index[way, message.made_by] = len(index)

    needs = {
        index["compute", message.first]: index["recv", message.made_by]
        for _, _, pair in incoming
        for message in flow.channels[pair]
    }
    rows = [Instruction(0, Op.CALLBACK, a, waits=_some(needs.get(i))) for i, a in enumerate(row)]
    for i, (action, after) in enumerate(sums.items(), len(row)):
        waits = tuple(index["compute", a] for a in after) + _some(needs.get(i))
        rows.append(Instruction(1, Op.CALLBACK, action, waits=waits))
    for lane, (way, channel, pair) in enumerate(transfers, 2 if sums else 1):
        messages = flow.channels[pair]
        op = Op.SEND if way == "send" else Op.RECEIVE
        for message, (slot, before) in zip(messages, coloured[pair], strict=True):
            waits = ()
            if op == Op.SEND:
                waits = (index["compute", message.made_by],)
            elif before is not None:
                waits = _releases(messages[before], index)
            rows.append(Instruction(lane, op, message.made_by, channel, slot, waits=waits))
    waited = {w for instruction in rows for w in instruction.waits}
    names = ["compute", *(["tied"] if sums else [])]
    names += [*(f"send:{q}" for q in destinations), *(f"recv:{q}" for q in sources)]
    return Program(
        rank=rank,
        lanes=tuple(names),
        instructions=tuple(replace(entry, signals=i in waited) for i, entry in enumerate(rows)),
        destinations=destinations,
        sources=sources,
        sends={index["compute", a]: i for (way, a), i in index.items() if way == "send"},
        needs=needs,
        together={
            index["compute", action]: tuple(a.microbatch for a in run) if action == run[-1] else ()
            for run in flow.schedule.runs
            if flow.schedule.placement[run[0].stage] == rank
            for action in run
        },
    )


def _some(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)


def _releases(message: Message, index: dict[tuple[str, Action], int]) -> tuple[int, ...]:
    """The instructions after which nothing reads the message any more."""
    compute = max(index["compute", action] for action in message.last)
    return (compute, *(index["send", action] for action in message.sends))


def cosimulate(programs: Programs) -> None:
    """Run all ranks' lanes against each other with the slots there are; raise if they get stuck.

    A slot is let go of as late as the executor may do it: when the next receive into it begins.
    The system is monotone (a marked graph), so if one order of events ends, every order does.
    Raises ScheduleError naming what each lane is stuck at.
    """
    state = _Cosimulation(programs)
    while state.advance():
        pass
    stuck = state.stuck()
    if stuck:
        raise ScheduleError("the ranks wait for each other in a circle: " + "; ".join(stuck))


class _Cosimulation:
    def __init__(self, programs: Programs) -> None:
        self.programs = programs.ranks
        self.done = [[False] * len(program.instructions) for program in self.programs]
        self.queues: list[tuple[int, str, list[int]]] = []
        for program in self.programs:
            by_lane: list[list[int]] = [[] for _ in program.lanes]
            for i, instruction in enumerate(program.instructions):
                by_lane[instruction.lane].append(i)
            self.queues += [
                (program.rank, lane, queue[::-1])
                for lane, queue in zip(program.lanes, by_lane, strict=True)
            ]
        self.sent = {pair: [0] * n for pair, n in programs.slots.items()}
        self.received = {pair: [0] * n for pair, n in programs.slots.items()}
        self.free = {pair: [0] * n for pair, n in programs.slots.items()}

    def advance(self) -> bool:
        """Let every lane run as far as it can; False if none moved."""
        moved = False
        for rank, _, queue in self.queues:
            while queue and self._try(rank, queue[-1]):
                self.done[rank][queue.pop()] = True
                moved = True
        return moved

    def _try(self, rank: int, index: int) -> bool:
        program = self.programs[rank]
        instruction = program.instructions[index]
        if not all(self.done[rank][w] for w in instruction.waits):
            return False
        if instruction.op == Op.SEND:
            pair, slot = (rank, program.destinations[instruction.channel]), instruction.slot
            if self.free[pair][slot] != self.sent[pair][slot]:
                return False
            self.sent[pair][slot] += 1
        elif instruction.op == Op.RECEIVE:
            pair, slot = (program.sources[instruction.channel], rank), instruction.slot
            self.free[pair][slot] = self.received[pair][slot]
            if self.sent[pair][slot] == self.received[pair][slot]:
                return False
            self.received[pair][slot] += 1
        return True

    def stuck(self) -> Sequence[str]:
        return [
            f"rank {rank} {lane} at {self.programs[rank].instructions[queue[-1]].action}"
            for rank, lane, queue in self.queues
            if queue
        ]
