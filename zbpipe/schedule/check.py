"""Prove a schedule complete, in order, free of deadlock and inside its memory, or say where not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..costs import Costs
from ..errors import ConfigError, MemoryBudgetError, ScheduleError
from .core import KINDS, Action, Schedule
from .simulate import Replay, planned_peak

# Budgets are often products such as 1.5 · p · act: a rounding error must not fail them.
_TOLERANCE = 1e-9
# A grid in an error message is a window on the bad cell, so that it fits a terminal.
_CELLS_BEFORE, _CELLS_AFTER, _RANKS_AROUND = 6, 4, 4

Cell = tuple[int, int]


def check(
    schedule: Schedule,
    costs: Costs | None = None,
    budget: float | Sequence[float] | None = None,
) -> None:
    """Prove that `schedule` does one whole step, or raise.

    Every stage runs each microbatch's F once, then its B once or its I and later its W, all on
    the rank of its placement, and no rank waits for ever for another. With `budget` (bytes, one
    number or one a rank) the peak of activations and stash plus the largest transient of the
    rank's stages must not exceed it; that needs `costs`.

    Raises ScheduleError with the grid around the bad cell, which is marked >so<;
    MemoryBudgetError naming the rank that lacks most, how much, and what would fit; ConfigError
    on costs or a budget of the wrong length.
    """
    _check_cells(schedule)
    _check_complete(schedule)
    replay = Replay(schedule, Costs.uniform(schedule.stages))
    if replay.stuck:
        raise _error(schedule, f"deadlock: {replay.explain()}", replay.stuck.items())
    if costs is not None and costs.stages != schedule.stages:
        raise ConfigError(f"costs are for {costs.stages} stages: want {schedule.stages}")
    if budget is not None:
        if costs is None:
            raise ConfigError("a memory budget needs costs, for the bytes a microbatch takes")
        _check_memory(schedule, costs, _per_rank(budget, schedule.ranks))


def _check_cells(schedule: Schedule) -> None:
    """Each cell by itself and against the cells before it on its rank."""
    for rank, row in enumerate(schedule.rows):
        done: set[Action] = set()
        for index, action in enumerate(row):
            if fault := _fault(schedule, rank, action, done):
                raise _error(schedule, f"rank {rank}, {action}: {fault}", [(rank, index)])
            done.add(action)


def _fault(schedule: Schedule, rank: int, action: Action, done: Collection[Action]) -> str | None:
    stage, kind, microbatch = action
    if kind not in KINDS:
        return f"no such action: want one of {', '.join(KINDS)}"
    if not 0 <= stage < schedule.stages:
        return f"no such stage: want 0 to {schedule.stages - 1}"
    if not 0 <= microbatch < schedule.microbatches:
        return f"no such microbatch: want 0 to {schedule.microbatches - 1}"
    if microbatch not in schedule.microbatches_of(stage):
        return f"microbatch {microbatch} belongs to another copy than stage {stage}"
    if schedule.placement[stage] != rank:
        return f"stage {stage} lives on rank {schedule.placement[stage]}"
    if action in done:
        return "comes twice"
    if kind == "F":
        return None
    forward, split, fused = (Action(stage, letter, microbatch) for letter in "FIB")
    if kind == "W":
        return None if split in done else f"comes before {split}"
    if forward not in done:
        return f"comes before {forward}"
    other = fused if kind == "I" else split
    return f"{other} has already made this gradient" if other in done else None


def _check_complete(schedule: Schedule) -> None:
    """With every cell in order, what is missing shows in the sets alone."""
    for stage, rank in enumerate(schedule.placement):
        row = schedule.rows[rank]
        done = {(action.kind, action.microbatch) for action in row if action.stage == stage}
        for microbatch in schedule.microbatches_of(stage):
            kinds = "".join(kind for kind in "FIWB" if (kind, microbatch) in done)
            if kinds in ("FB", "FIW"):
                continue
            lacking = {"": "F", "F": "B, or I and W,", "FI": "W"}[kinds]
            raise _error(
                schedule,
                f"rank {rank} lacks {lacking} of stage {stage}, microbatch {microbatch}",
                [(rank, len(row))],
            )


def _per_rank(budget: float | Sequence[float], ranks: int) -> Sequence[float]:
    limits = [budget] * ranks if isinstance(budget, int | float) else list(budget)
    if len(limits) != ranks:
        raise ConfigError(f"budget has {len(limits)} entries: want one number, or {ranks}")
    for rank, limit in enumerate(limits):
        if not limit >= 0:
            raise ConfigError(f"budget[{rank}] = {limit!r}: want bytes ≥ 0")
    return limits


def _check_memory(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> None:
    peaks = [planned_peak(schedule, costs, rank) for rank in range(schedule.ranks)]
    lacking = [peak - limit for peak, limit in zip(peaks, limits, strict=True)]
    rank = max(range(schedule.ranks), key=lacking.__getitem__)
    if lacking[rank] <= _TOLERANCE * limits[rank]:
        return
    stages = schedule.stages_of(rank)
    needs = ", ".join(f"{peak:.15g}" for peak in peaks)
    raise MemoryBudgetError(
        f"{schedule.name or 'schedule'} does not fit: rank {rank} "
        f"(stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}) lacks "
        f"{lacking[rank]:.15g} bytes, it needs {peaks[rank]:.15g} of {limits[rank]:.15g}; "
        f"what would fit: a budget of {max(peaks):.15g} bytes for all, or per rank [{needs}]"
    )


def _error(schedule: Schedule, message: str, bad: Collection[Cell]) -> ScheduleError:
    name = f"{schedule.name}: " if schedule.name else ""
    return ScheduleError(f"{name}{message}\n{grid(schedule, bad)}")


def grid(schedule: Schedule, bad: Collection[Cell]) -> str:
    """The cells by rank and position around the `bad` (rank, index) ones, which are marked >so<.

    An index past a row's end marks where an action is missing.
    """
    ranks = [rank for rank, _ in bad]
    low, high = max(0, min(ranks) - _RANKS_AROUND), max(ranks) + _RANKS_AROUND + 1
    first = max(0, min(index for _, index in bad) - _CELLS_BEFORE)
    last = min(max(index for _, index in bad), first + 2 * _CELLS_BEFORE) + _CELLS_AFTER
    lines = []
    for rank, row in list(enumerate(schedule.rows))[low:high]:
        cells = [
            f">{row[index] if index < len(row) else '?'}<"
            if (rank, index) in bad
            else f" {row[index] if index < len(row) else ''} "
            for index in range(first, last)
        ]
        lines.append((f"rank {rank}", "…" if first else "", cells, "…" if last < len(row) else ""))
    width = max(len(cell) for _, _, cells, _ in lines for cell in cells)
    label = max(len(name) for name, *_ in lines)
    return "\n".join(
        f"{name:<{label}} |{before}{''.join(f'{cell:<{width}}' for cell in cells)}{after}".rstrip()
        for name, before, cells, after in lines
    )
