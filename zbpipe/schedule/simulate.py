"""Replay a schedule with given costs: when every action runs, and what each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..costs import Costs
from ..errors import ConfigError, ScheduleError
from ..timeline import Span, Timeline
from .core import KINDS, Action, Schedule

_ABSENT = -1.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run every action as early as its rank's order and its inputs allow, from 0 seconds on.

    F of stage s waits for F of s - 1, I and B for the gradient of s + 1 and their own F, W for its
    own I; `costs.comm` is added where the two stages live on different ranks. Memory in bytes:
    F + act at its start; at their ends I - (act - stash), W - stash, B - act.

    Raises ScheduleError if some actions can never run, naming the one each rank is stuck at, and
    ConfigError if `costs` are of another number of stages.
    """
    if costs.stages != schedule.stages:
        raise ConfigError(f"costs are for {costs.stages} stages: want {schedule.stages}")
    replay = Replay(schedule, costs)
    if replay.stuck:
        raise ScheduleError(f"{schedule.name or 'schedule'} cannot run: {replay.explain()}")
    memory = tuple(
        tuple(
            (span.start if span.action is not None and span.action.kind == "F" else span.end, held)
            for span, held in zip(spans, held_bytes(row, costs), strict=True)
        )
        for row, spans in zip(schedule.rows, replay.spans, strict=True)
    )
    return Timeline(
        tuple(span for row in replay.spans for span in row), schedule.ranks, memory, "simulated"
    )


def held_bytes(row: Sequence[Action], costs: Costs) -> Iterator[float]:
    """The bytes that a rank holds after each change of `row` (F at its start, others at the end).

    Counted in whole microbatches and multiplied once, so that no rounding adds up.
    """
    stages = sorted({action.stage for action in row})
    acts = dict.fromkeys(stages, 0)
    stashes = dict.fromkeys(stages, 0)
    for stage, kind, _ in row:
        if kind == "F":
            acts[stage] += 1
        elif kind == "W":
            stashes[stage] -= 1
        else:
            acts[stage] -= 1
            stashes[stage] += kind == "I"
        yield sum(acts[s] * costs.act[s] + stashes[s] * costs.stash[s] for s in stages)


def planned_peak(schedule: Schedule, costs: Costs, rank: int) -> float:
    """Bytes the rank needs: its most activations and stash at once, and its largest transient."""
    held = max(held_bytes(schedule.rows[rank], costs), default=0.0)
    return held + max((costs.transient[s] for s in schedule.stages_of(rank)), default=0.0)


def microbatches_held(schedule: Schedule, released: str = "I") -> tuple[float, ...]:
    """The most microbatches each rank holds at once, from F until `released` (I or W; B is both).

    On a rank of v chunks each of them holds 1/v of a microbatch.
    """
    if released not in ("I", "W"):
        raise ConfigError(f"released = {released!r}: want I or W")
    step = {"F": 1, "B": -1, released: -1}
    return tuple(
        max(accumulate(step.get(kind, 0) for _, kind, _ in row), default=0)
        / max(1, len(schedule.stages_of(rank)) // schedule.copies)
        for rank, row in enumerate(schedule.rows)
    )


class Replay:
    """The replay itself: `spans[rank]` of what could run, `stuck` (rank → index) of what not.

    A rank runs on until its next action lacks an input; whoever makes that input wakes it. Times
    are maxima over inputs, so the order in which ranks are visited does not change them.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        m, stages, placement = schedule.microbatches, schedule.stages, schedule.placement
        self._require_known_cells()
        # When, by stage · m + microbatch: the input is there, F is done, the gradient is there,
        # I is done. The first stage's inputs and the last stage's gradients come from nowhere.
        depth = schedule.depth
        self._input, self._gradient = [_ABSENT] * (stages * m), [_ABSENT] * (stages * m)
        for first in range(0, stages, depth):
            self._input[first * m : (first + 1) * m] = [0.0] * m
            last = first + depth - 1
            self._gradient[last * m : (last + 1) * m] = [0.0] * m
        self._forward = [_ABSENT] * (stages * m)
        self._linked = [schedule.linked(stage) for stage in range(stages)]
        self._backward = [_ABSENT] * (stages * m)
        self._hop = [
            costs.comm[s] if placement[s] != placement[s + 1] else 0.0 for s in range(stages - 1)
        ]
        self.spans: list[list[Span]] = [[] for _ in schedule.rows]
        self._clock = [0.0] * schedule.ranks
        awake = list(range(schedule.ranks))
        while awake:
            awake.extend(self._run(awake.pop()))
        self.stuck = {
            rank: len(done)
            for rank, (row, done) in enumerate(zip(schedule.rows, self.spans, strict=True))
            if len(done) < len(row)
        }

    def _require_known_cells(self) -> None:
        stages, m = self._schedule.stages, self._schedule.microbatches
        for rank, row in enumerate(self._schedule.rows):
            for action in row:
                stage, kind, microbatch = action
                if not (0 <= stage < stages and 0 <= microbatch < m and kind in KINDS):
                    raise ScheduleError(
                        f"rank {rank} has an action {action}: want stages below {stages}, "
                        f"one of {KINDS}, microbatches below {m}"
                    )

    def _run(self, rank: int) -> set[int]:
        """Run `rank` as far as it gets; returns the ranks whose inputs that made."""
        schedule, costs = self._schedule, self._costs
        m, linked, placement = schedule.microbatches, self._linked, schedule.placement
        row, done, clock = schedule.rows[rank], self.spans[rank], self._clock[rank]
        woken: set[int] = set()
        for index in range(len(done), len(row)):
            action = row[index]
            stage, kind, microbatch = action
            at = stage * m + microbatch
            ready = self._ready(kind, at)
            if ready < 0:
                break
            start = ready if ready > clock else clock
            clock = start + costs.duration(action)
            done.append(Span(rank, "compute", action, start, clock))
            if kind == "F":
                self._forward[at] = clock
                if linked[stage]:
                    self._input[at + m] = clock + self._hop[stage]
                    woken.add(placement[stage + 1])
            elif kind != "W":
                self._backward[at] = clock
                if stage and linked[stage - 1]:
                    self._gradient[at - m] = clock + self._hop[stage - 1]
                    woken.add(placement[stage - 1])
        self._clock[rank] = clock
        return woken - {rank}

    def _ready(self, kind: str, at: int) -> float:
        """Seconds at which the action's inputs are there; negative if one is not."""
        if kind == "F":
            return self._input[at]
        if kind == "W":
            return self._backward[at]
        forward, gradient = self._forward[at], self._gradient[at]
        return max(forward, gradient) if forward >= 0 and gradient >= 0 else _ABSENT

    def explain(self) -> str:
        """Which action each rank is stuck at, and what it waits for."""
        return "; ".join(
            f"rank {rank} waits at {action} for {self._lacks(action)}"
            for rank, action in (
                (rank, self._schedule.rows[rank][index]) for rank, index in self.stuck.items()
            )
        )

    def _lacks(self, action: Action) -> str:
        stage, kind, microbatch = action
        at = stage * self._schedule.microbatches + microbatch
        if kind == "F":
            return f"{stage - 1}F{microbatch}"
        if kind == "W":
            return f"{stage}I{microbatch}"
        if self._forward[at] < 0:
            return f"{stage}F{microbatch}"
        return f"the gradient of {stage + 1}F{microbatch}"
