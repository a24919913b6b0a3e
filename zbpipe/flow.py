"""What travels between the ranks of a Schedule: who sends it, and who reads it for how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .errors import ScheduleError
from .schedule.core import Action, Schedule


@dataclass(frozen=True)
class Message:
    """A transfer: what made it, and the actions that read it first and last."""

    made_by: Action
    first: Action
    last: tuple[Action, ...]
    sends: tuple[Action, ...]


class Flow:
    """Who sends what to whom, in each sender's order, and how long it is read."""

    def __init__(self, schedule: Schedule, forward_only: bool, tied: bool = False) -> None:
        self.schedule = schedule
        self.forward_only = forward_only
        self.place = {action: i for row in schedule.rows for i, action in enumerate(row)}
        # The W's of a run may all be computed at its end, and what they read is held until then.
        self._ends: dict[Action, Action] = {}
        for run in schedule.runs:
            self._check(run)
            self._ends.update(dict.fromkeys(run, run[-1]))
        # What a rank does in its lane for tied gradients, and the actions that it is to wait for.
        self.sums: list[dict[Action, tuple[Action, ...]]] = [{} for _ in schedule.rows]
        handed = self._tie() if tied else {}
        self.channels: dict[tuple[int, int], list[Message]] = {}
        for rank, row in enumerate(schedule.rows):
            for action in row:
                for sent in (action, *handed.get(action, ())):
                    target = self.target(sent)
                    if target is not None and target[1] != rank:
                        pair = (rank, target[1])
                        self.channels.setdefault(pair, []).append(self._message(sent))

    def _check(self, run: tuple[Action, ...]) -> None:
        """A run is W's of one stage, next to each other in its rank's row, and in no other run."""
        stage = run[0].stage if run else -1
        row: tuple[Action, ...] = ()
        if 0 <= stage < self.schedule.stages:
            row = self.schedule.rows[self.schedule.placement[stage]]
        at = self.place.get(run[0], 0) if run else 0
        if not run or row[at : at + len(run)] != run or any(a[:2] != (stage, "W") for a in run):
            raise ScheduleError(
                f"runs has ({', '.join(map(str, run))}): want W's of one stage that stand next to "
                "each other in their rank's row"
            )
        twice = next((action for action in run if action in self._ends), None)
        if twice is not None:
            raise ScheduleError(f"runs has {twice} in two runs: want every W in one at most")

    def _tie(self) -> dict[Action, tuple[Action, ...]]:
        """Place R and S; what each R follows."""
        schedule = self.schedule
        ends = (0, schedule.stages - 1)
        every = range(schedule.microbatches)
        final = tuple(
            max((self._last(s, i) for i in every), key=self.place.__getitem__) for s in ends
        )
        first, last = (schedule.placement[stage] for stage in ends)
        if first == last:
            self._place(first, Action(0, "S", 0), tuple(dict.fromkeys(final)))
            return {}
        for stage, rank, after in zip(ends, (first, last), final, strict=True):
            self._place(rank, Action(stage, "R", 0), (after,))
            self._place(rank, Action(stage, "S", 0), ())
        return {a: (Action(s, "R", 0),) for s, a in zip(ends, final, strict=True)}

    def _place(self, rank: int, action: Action, after: tuple[Action, ...]) -> None:
        self.sums[rank][action] = after
        self.place[action] = len(self.schedule.rows[rank])  # after all that is computed

    def target(self, action: Action) -> tuple[int, int] | None:
        """The stage that `action`'s result goes to and its rank; None at the pipeline's ends."""
        if action.kind in "WS":
            return None
        stage = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "R":
            stage = self.schedule.stages - 1 - action.stage
        if not 0 <= stage < self.schedule.stages:
            return None
        return stage, self.schedule.placement[stage]

    def reader(self, action: Action) -> Action:
        """The action of the next stage that reads `action`'s result."""
        target = self.target(action)
        assert target is not None
        if action.kind == "F":
            return Action(target[0], "F", action.microbatch)
        return self._backward(target[0], action.microbatch)

    def _backward(self, stage: int, microbatch: int) -> Action:
        fused = Action(stage, "B", microbatch)
        return fused if fused in self.place else Action(stage, "I", microbatch)

    def _last(self, stage: int, microbatch: int) -> Action:
        """The action after which `stage` holds nothing of the microbatch."""
        fused = Action(stage, "B", microbatch)
        if fused in self.place:
            return fused
        alone = Action(stage, "W", microbatch)
        return self._ends.get(alone, alone)

    def _message(self, action: Action) -> Message:
        """Who reads what `action` sends.

        A stage may pass on what it received, also in a gradient (a backward may return what its
        forward saved), so stages of one rank read one another's slots.
        """
        if action.kind == "R":
            sums = Action(self.schedule.stages - 1 - action.stage, "S", 0)
            return Message(action, sums, (sums,), ())
        first = self.reader(action)
        rank = self.schedule.placement[first.stage]
        makers = list(self._chain(first, rank))
        if self.forward_only:
            last = makers
        else:
            last = [self._last(reader.stage, reader.microbatch) for reader in makers]
            for reader in tuple(makers):
                if reader.kind == "F":
                    makers += self._chain(self._backward(reader.stage, reader.microbatch), rank)
        sends = [maker for maker in dict.fromkeys(makers) if self._leaves(maker, rank)]
        return Message(action, first, tuple(last), tuple(sends))

    def _chain(self, action: Action, rank: int) -> Iterator[Action]:
        """`action` and those after it, while the result goes to another stage of `rank`."""
        yield action
        while (target := self.target(action)) is not None and target[1] == rank:
            action = self.reader(action)
            yield action

    def _leaves(self, action: Action, rank: int) -> bool:
        target = self.target(action)
        return target is not None and target[1] != rank
