"""Action and Schedule: who does what in which order, and the text grammar they travel in."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ScheduleError

KINDS = "FIWB"
# Beside a schedule, in Programs only: R hands a tied gradient over, S sums it with the other one.
SUMS = "RS"

_CELL = re.compile(rf"(\d+)([{KINDS}{SUMS}])(\d+)", re.ASCII)
# torch writes two actions that it runs at once as one cell: (0F1;1B0)OVERLAP_F_B
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One cell of a schedule: `kind` F, I, W or B of one microbatch on one stage."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str, kinds: str = KINDS) -> Action:
        """Read `2F0`, of one of `kinds`; raises ScheduleError on anything else."""
        match = _CELL.fullmatch(text.strip())
        if match is None or match[2] not in kinds:
            raise ScheduleError(
                f"{text.strip()!r} is no action: want stage, one of {kinds}, microbatch, as in 2F0"
            )
        return cls(int(match[1]), match[2], int(match[3]))


def linear_placement(ranks: int) -> tuple[int, ...]:
    """One stage a rank, in order."""
    return tuple(range(ranks))


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of every rank. Any order can be held; `check` says whether it is one.

    `rows[rank]` are the rank's actions; `placement[stage]` is the rank that runs the stage.
    `copies`: pipelines side by side (2 for DualPipe, else 1). Each has its share of the stages, in
    order, and of the microbatches, as numpy.array_split cuts them.
    `runs`: W's of a stage that stand next to each other in its rank's row, to be computed as one
    where a device gains by it.
    Raises ScheduleError if there is no rank, no microbatch, or a stage placed on no such rank.
    """

    rows: tuple[tuple[Action, ...], ...]
    microbatches: int
    placement: tuple[int, ...]
    name: str = ""
    copies: int = 1
    runs: tuple[tuple[Action, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ScheduleError(f"microbatches = {self.microbatches}: want at least 1")
        if not self.rows or not self.placement:
            raise ScheduleError("a schedule needs at least one rank and one stage")
        if self.copies < 1 or len(self.placement) % self.copies:
            raise ScheduleError(
                f"copies = {self.copies}: want a divisor of the {len(self.placement)} stages"
            )
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < len(self.rows):
                raise ScheduleError(
                    f"placement[{stage}] = {rank}: want a rank from 0 to {len(self.rows) - 1}"
                )

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` runs, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def depth(self) -> int:
        """Stages that a microbatch passes."""
        return self.stages // self.copies

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that run through `stage`: all of them, or its copy's share."""
        copy = stage // self.depth
        size, larger = divmod(self.microbatches, self.copies)
        start = copy * size + min(copy, larger)
        return range(start, start + size + (copy < larger))

    def linked(self, stage: int) -> bool:
        """Whether `stage` passes its output on to stage + 1: not where a copy ends."""
        return 0 <= stage < self.stages - 1 and (stage + 1) % self.depth != 0

    def digest(self) -> str:
        """32 hex digits that are equal exactly where rows and placement are (not name or runs)."""
        text = f"{','.join(map(str, self.placement))}\n{self._text()}"
        text += f"copies {self.copies}\n" if self.copies > 1 else ""
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_csv(self) -> str:
        """One line a rank, one cell an action, no header: what torch's pipelining reads.

        Raises ScheduleError for a schedule of several copies, which that grammar cannot say.
        """
        if self.copies > 1:
            raise ScheduleError(
                f"{self.name or 'schedule'} has {self.copies} copies: no CSV for it"
            )
        return self._text()

    def _text(self) -> str:
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    @classmethod
    def from_csv(
        cls, text: str, placement: Sequence[int] | None = None, name: str = ""
    ) -> Schedule:
        """Read torch.distributed.pipelining's compute-only CSV.

        Empty cells are skipped; `(0F1;1B0)OVERLAP_F_B` reads as its actions one after the other.
        Without `placement` the row that holds a stage says its rank. Raises ScheduleError naming
        line and cell (both from 1) of what cannot be read, and on a stage that two rows hold.
        """
        rows = tuple(
            tuple(_read_line(line, number))
            for number, line in enumerate(text.removeprefix("\ufeff").rstrip().splitlines(), 1)
        )
        actions = [action for row in rows for action in row]
        if not actions:
            raise ScheduleError("the CSV holds no action")
        microbatches = 1 + max(action.microbatch for action in actions)
        placed = _infer_placement(rows) if placement is None else tuple(placement)
        return cls(rows, microbatches, placed, name)


def _read_line(line: str, number: int) -> Iterator[Action]:
    for column, raw in enumerate(line.split(","), 1):
        cell = raw.strip().strip('"').strip()
        if not cell:
            continue
        overlap = _OVERLAP.fullmatch(cell)
        try:
            for part in overlap[1].split(";") if overlap else [cell]:
                yield Action.parse(part)
        except ScheduleError as error:
            raise ScheduleError(f"line {number}, cell {column}: {error}") from None


def _infer_placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for cell, action in enumerate(row, 1):
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"line {rank + 1}, action {cell} ({action}): stage {action.stage} is already "
                    f"on line {owner[action.stage] + 1}; a stage lives on one rank"
                )
    missing = [stage for stage in range(max(owner) + 1) if stage not in owner]
    if missing:
        raise ScheduleError(f"no line holds an action of stage {missing[0]}")
    return tuple(owner[stage] for stage in range(len(owner)))
