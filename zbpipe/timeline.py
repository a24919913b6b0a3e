"""Timeline: what ran when and what it held, simulated and measured in one type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .errors import ConfigError
from .schedule.core import KINDS as CELL_KINDS
from .schedule.core import SUMS, Action

KINDS = ("simulated", "measured", "virtual")
OBJECTIVES = ("stage", "sync")
_ACTIONS = CELL_KINDS + SUMS


class Span(NamedTuple):
    """One piece of work: `lane` is "compute", or a transfer as "send:1"; times in seconds."""

    rank: int
    lane: str
    action: Action | None
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks and, per rank, the memory held.

    `memory[rank]` is a staircase of (seconds, bytes): the bytes hold from that time on. It is
    empty where nothing is known. `kind`: "simulated", "measured", or "virtual" (measured, with
    sleeps in place of work). All ranks' times are of one clock.
    """

    spans: tuple[Span, ...]
    ranks: int
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    kind: str = "simulated"

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"ranks = {self.ranks}: want at least 1")
        if self.kind not in KINDS:
            raise ConfigError(f"kind = {self.kind!r}: want one of {', '.join(KINDS)}")
        if not self.memory:
            object.__setattr__(self, "memory", ((),) * self.ranks)
        if len(self.memory) != self.ranks:
            raise ConfigError(f"memory has {len(self.memory)} curves: want {self.ranks}")
        for span in self.spans:
            if not 0 <= span.rank < self.ranks:
                raise ConfigError(f"{span}: want a rank from 0 to {self.ranks - 1}")

    @cached_property
    def _compute(self) -> tuple[tuple[Span, ...], ...]:
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            if span.lane == "compute":
                rows[span.rank].append(span)
        return tuple(tuple(sorted(row, key=lambda span: span.start)) for row in rows)

    def compute(self, rank: int) -> tuple[Span, ...]:
        """The spans of the rank's compute lane, in order of time."""
        return self._compute[rank]

    def makespan(self) -> float:
        """Seconds from the first compute span's start to the last one's end, over all ranks."""
        starts = [row[0].start for row in self._compute if row]
        ends = [span.end for row in self._compute for span in row]
        return max(ends) - min(starts) if ends else 0.0

    def span(self, rank: int) -> float:
        """Seconds from the start of the rank's first action to the end of its last."""
        row = self._compute[rank]
        return max(span.end for span in row) - row[0].start if row else 0.0

    def busy(self, rank: int) -> float:
        """Seconds that the rank computes."""
        return sum(span.end - span.start for span in self._compute[rank])

    def bubble(self, objective: str = "stage") -> float:
        """Bubble rate: idle ÷ whole over all ranks, 1 - Σ busy / (p · cost).

        "stage" is for an optimizer step that need not be synchronous: for equal stages it is the
        (cost - m (TF + TB + TW)) / cost of arXiv 2401.10241, section 5. 0 if nothing ran.
        """
        cost = self.cost(objective)
        return 1 - self._work() / (self.ranks * cost) if cost > 0 else 0.0

    def overhead(self, objective: str = "stage") -> float:
        """Bubble overhead: idle ÷ ideal time, (p - 1) / m for 1F1B; 0 if nothing ran."""
        work = self._work()
        return self.ranks * self.cost(objective) / work - 1 if work > 0 else 0.0

    def cost(self, objective: str = "stage") -> float:
        """Seconds: the largest rank's own span ("stage"), or the global span ("sync")."""
        if objective not in OBJECTIVES:
            raise ConfigError(f"objective = {objective!r}: want one of {', '.join(OBJECTIVES)}")
        return max(map(self.span, range(self.ranks))) if objective == "stage" else self.makespan()

    def _work(self) -> float:
        return sum(map(self.busy, range(self.ranks)))

    def peak(self, rank: int) -> float:
        """The most bytes that the rank holds; 0 where no curve is known."""
        return max((held for _, held in self.memory[rank]), default=0.0)

    def zeroed(self) -> Timeline:
        """The same timeline with its first span, of any lane, starting at 0 seconds."""
        origin = min((span.start for span in self.spans), default=0.0)
        spans = tuple(
            span._replace(start=span.start - origin, end=span.end - origin) for span in self.spans
        )
        memory = tuple(tuple((time - origin, held) for time, held in row) for row in self.memory)
        return Timeline(spans, self.ranks, memory, self.kind)

    @staticmethod
    def merge(parts: Iterable[Timeline]) -> Timeline:
        """One timeline out of those that each rank has of itself (same `ranks`, kind and clock).

        Raises ConfigError if the parts do not belong together or two tell of the same rank.
        """
        parts = tuple(parts)
        if not parts:
            raise ConfigError("merge of no timelines: want at least one")
        ranks, kind = parts[0].ranks, parts[0].kind
        memory: list[tuple[tuple[float, float], ...]] = [()] * ranks
        owner: dict[int, int] = {}
        for index, part in enumerate(parts):
            if (part.ranks, part.kind) != (ranks, kind):
                raise ConfigError(
                    f"merge of {kind} over {ranks} ranks with {part.kind} over {part.ranks}"
                )
            for rank in {span.rank for span in part.spans} | part._with_memory():
                if owner.setdefault(rank, index) != index:
                    raise ConfigError(
                        f"merge: parts {owner[rank]} and {index} both tell of rank {rank}"
                    )
            for rank in part._with_memory():
                memory[rank] = part.memory[rank]
        spans = sorted((s for part in parts for s in part.spans), key=lambda span: span.rank)
        return Timeline(tuple(spans), ranks, tuple(memory), kind)

    def _with_memory(self) -> set[int]:
        return {rank for rank, curve in enumerate(self.memory) if curve}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back to an equal Timeline."""
        return {
            "kind": self.kind,
            "ranks": self.ranks,
            "spans": [
                [rank, lane, None if action is None else str(action), start, end]
                for rank, lane, action, start, end in self.spans
            ],
            "memory": [[list(point) for point in curve] for curve in self.memory],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """Inverse of `to_dict`."""
        spans = tuple(
            Span(rank, lane, None if action is None else Action.parse(action, _ACTIONS), start, end)
            for rank, lane, action, start, end in data["spans"]
        )
        memory = tuple(tuple((time, held) for time, held in curve) for curve in data["memory"])
        return cls(spans, data["ranks"], memory, data["kind"])
