"""`zbpipe schedule`: the best order for given times and memory, and how good it could get."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..costs import Costs
from ..errors import ConfigError, MemoryBudgetError, ScheduleError
from ..schedule.bounds import lower_bound
from ..schedule.check import check
from ..schedule.core import Schedule
from ..schedule.placements import PLACEMENTS, chunked, placement
from ..schedule.render import svg, text
from ..schedule.search import SHORT_LIMIT, TIME_LIMIT, Found
from ..schedule.simulate import planned_peak, simulate
from ..schedule.solve import solve
from ..timeline import OBJECTIVES, Timeline
from . import amounts

MOST_STAGES, MOST_ACTIONS = 1024, 2_000_000


def add(commands: Any) -> None:
    """Add the sub-command to argparse's `commands`."""
    parser = commands.add_parser(
        "schedule",
        help="find, check or compare schedules for given times and memory",
        description="Searches the best order of F, I and W for the times of a stage under a memory "
        "budget, draws it, and says how far from a proven bound it is. With --load it checks and "
        "simulates an order that you bring.",
    )
    arg = parser.add_argument
    arg("--stages", type=int, help="number of ranks p, also where a rank holds several chunks")
    arg("--microbatches", type=int, help="microbatches m of a global batch")
    arg("--times", default="1,1,1", help="F,I,W of a full stage, in any one unit (default 1,1,1)")
    arg("--comm", default="0", help="a hop between two ranks, or p - 1 of them (default 0)")
    arg("--act", default="1", help="held from F until I by a full stage (default 1), or bytes")
    arg("--stash", default="1", help="the part of act that stays until W (default 1), or bytes")
    arg("--costs", type=Path, metavar="FILE", help="per-stage costs, as Costs.to_dict in JSON")
    arg("--memory", help="budget a rank: 1.5p (p = stages x act), 12 (act) or 60GiB; or one a rank")
    arg("--objective", default="stage", help="stage: longest span of a rank; sync: global span")
    arg("--placement", default="linear", help=f"{', '.join(PLACEMENTS)} or auto (default linear)")
    arg("--family", help="a fixed shape, zb1p or zb2p, in place of the search")
    arg("--compare", help="names with commas in between: a table of them beside the search")
    arg("--exact", type=float, metavar="SECONDS", help="then let CP-SAT improve it that long")
    arg("--load", type=Path, metavar="CSV", help="check and simulate this order instead")
    arg("--seed", type=int, default=0, help="of the search (default 0)")
    arg(
        "--time-limit",
        type=float,
        help=f"seconds for the search of a placement (default {TIME_LIMIT:g}; zb1p, zb2p "
        f"{SHORT_LIMIT:g})",
    )
    arg("--csv", type=Path, metavar="FILE", help="write the order: a line a rank, no header")
    arg("--svg", type=Path, metavar="FILE", help="write the picture")
    arg("--json", type=Path, metavar="FILE", help="write the figures")
    arg("--width", type=int, default=120, help="columns of the picture (default 120)")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Given:
    """What the options say: costs of full stages or of a placement's, and the budget, in bytes."""

    costs: Costs
    microbatches: int
    ranks: int
    budget: list[float] | None
    args: argparse.Namespace

    def costs_of(self, placed: Sequence[int]) -> Costs:
        """The costs of the stages of a placement."""
        return self.costs if self.costs.stages == len(placed) else chunked(self.costs, placed)


@dataclass(frozen=True)
class Answer:
    """A schedule with everything that is said about it. Times in the unit that they came in."""

    found: Found
    costs: Costs
    timeline: Timeline
    bounds: dict[str, float]
    peak: list[float]

    @property
    def schedule(self) -> Schedule:
        return self.found.schedule


def run(args: argparse.Namespace) -> int:
    """Run the sub-command; returns 0. Raises ZbpipeError on bad input and on what cannot be had."""
    _require_files(args)
    if args.objective not in OBJECTIVES:
        raise ConfigError(f"--objective {args.objective!r}: want one of {', '.join(OBJECTIVES)}")
    if args.load is not None:
        given, found = _loaded(args)
    else:
        given = _given(args, args.stages, args.microbatches)
        found = _found(given)
    answer = _answer(given, found)
    _show(answer, args.width)
    if args.compare:
        _compare(given, answer, args.compare)
    if args.csv is not None:
        args.csv.write_text(answer.schedule.to_csv())
    if args.svg is not None:
        args.svg.write_text(svg(answer.timeline))
    if args.json is not None:
        args.json.write_text(json.dumps(_to_json(answer), indent=2) + "\n")
    return 0


def _require_files(args: argparse.Namespace) -> None:
    for option in ("csv", "svg", "json"):
        path = getattr(args, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{option} {path}: there is no folder {path.absolute().parent}")
    for option in ("load", "costs"):
        path = getattr(args, option)
        if path is not None and not path.is_file():
            raise ConfigError(f"--{option} {path}: there is no such file")


def _given(args: argparse.Namespace, ranks: int | None, microbatches: int | None) -> Given:
    costs = _from_file(args.costs) if args.costs is not None else None
    if costs is not None and ranks is None:
        ranks = costs.stages
    for option, value in (("stages", ranks), ("microbatches", microbatches)):
        if value is None:
            raise ConfigError(f"--{option} is missing: want a number, as --{option} 8")
        if value < 1:
            raise ConfigError(f"--{option} {value}: want at least 1")
    assert ranks is not None and microbatches is not None
    if ranks > MOST_STAGES or ranks * microbatches * 3 > MOST_ACTIONS:
        raise ConfigError(
            f"--stages {ranks} --microbatches {microbatches}: want at most {MOST_STAGES} stages "
            f"and {MOST_ACTIONS} actions"
        )
    if costs is None:
        costs = _from_options(args, ranks)
    elif costs.stages % ranks:
        raise ConfigError(f"--costs {args.costs} is for {costs.stages} stages: want {ranks}")
    budget = None
    if args.memory is not None:
        budget = amounts.memory(args.memory, _full_acts(costs, ranks))
    if args.time_limit is not None and not args.time_limit > 0:
        raise ConfigError(f"--time-limit {args.time_limit}: want seconds > 0")
    return Given(costs, microbatches, ranks, budget, args)


def _from_file(path: Path) -> Costs:
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"--costs {path}: no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"--costs {path}: want an object with the fields of Costs")
    return Costs.from_dict(data)


def _from_options(args: argparse.Namespace, ranks: int) -> Costs:
    f, i, w = amounts.numbers("--times", args.times, (3,))
    comm = amounts.numbers("--comm", args.comm, (1, ranks - 1))
    act, stash = amounts.size("--act", args.act), amounts.size("--stash", args.stash)
    hops = comm * (ranks - 1) if len(comm) == 1 else comm
    return Costs(
        forward=(f,) * ranks,
        input_grad=(i,) * ranks,
        weight_grad=(w,) * ranks,
        comm=tuple(hops),
        act=(act,) * ranks,
        stash=(stash,) * ranks,
    )


def _full_acts(costs: Costs, ranks: int) -> list[float]:
    """Bytes of act of each rank's full stage."""
    if costs.stages == ranks:
        return list(costs.act)
    placed = placement("v", ranks) if costs.stages == 2 * ranks else range(ranks)
    acts = [0.0] * ranks
    for stage, rank in enumerate(placed):
        acts[rank] += costs.act[stage]
    return acts


def _found(given: Given) -> Found:
    args = given.args
    if args.placement not in (*PLACEMENTS, "auto"):
        raise ConfigError(f"--placement {args.placement!r}: want {', '.join(PLACEMENTS)} or auto")
    kinds = PLACEMENTS if args.placement == "auto" else (args.placement,)
    per_chunk = given.costs.stages != given.ranks
    found = solve(
        args.family or "search",
        {"v": given.costs} if per_chunk else given.costs,
        given.microbatches,
        given.budget,
        args.objective,
        placements=("v",) if per_chunk else kinds,
        seed=args.seed,
        time_limit=args.time_limit,
    )
    if args.exact is None:
        return found
    from ..schedule.exact import improve

    costs = given.costs_of(found.schedule.placement)
    return improve(found, costs, given.budget, args.exact, seed=args.seed)


def _loaded(args: argparse.Namespace) -> tuple[Given, Found]:
    began = time.perf_counter()
    try:
        content = args.load.read_text()
    except UnicodeDecodeError:
        raise ScheduleError(f"--load {args.load}: this is no text") from None
    schedule = Schedule.from_csv(content, name=args.load.stem)
    for option, own in (("stages", schedule.ranks), ("microbatches", schedule.microbatches)):
        if getattr(args, option) not in (None, own):
            raise ConfigError(f"--{option} {getattr(args, option)}: {args.load} has {own}")
    check(schedule)
    given = _given(args, schedule.ranks, schedule.microbatches)
    costs = given.costs_of(schedule.placement)
    check(schedule, costs, given.budget)
    cost = simulate(schedule, costs).cost(args.objective)
    bound = _bound(given, schedule, costs, args.objective)
    seconds = time.perf_counter() - began
    return given, Found(schedule, args.objective, cost, bound, "checked", seconds)


def _bound(given: Given, schedule: Schedule, costs: Costs, objective: str) -> float:
    m = schedule.microbatches
    return lower_bound(costs, schedule.placement, m, given.budget, objective)


def _answer(given: Given, found: Found) -> Answer:
    schedule = found.schedule
    costs = given.costs_of(schedule.placement)
    bounds = {name: _bound(given, schedule, costs, name) for name in OBJECTIVES}
    bounds[found.objective] = max(bounds[found.objective], found.bound)
    acts = [sum(costs.act[s] for s in schedule.stages_of(rank)) for rank in range(schedule.ranks)]
    peak = [
        planned_peak(schedule, costs, rank) / act if act > 0 else 0.0
        for rank, act in enumerate(acts)
    ]
    return Answer(found, costs, simulate(schedule, costs), bounds, peak)


def _rate(answer: Answer, cost: float) -> float:
    """The bubble rate that a cost means."""
    timeline = answer.timeline
    work = sum(map(timeline.busy, range(timeline.ranks)))
    return 1 - work / (timeline.ranks * cost) if cost > 0 else 0.0


def _kind(schedule: Schedule) -> str:
    """The name of a schedule's placement."""
    for name in PLACEMENTS:
        if schedule.placement == placement(name, schedule.ranks):
            return name
    looped = tuple(s % schedule.ranks for s in range(schedule.stages))
    return "looped" if schedule.placement == looped else "other"


def _show(answer: Answer, width: int) -> None:
    schedule, found, timeline = answer.schedule, answer.found, answer.timeline
    print(
        f"{schedule.name or 'schedule'}: {schedule.ranks} ranks, {schedule.microbatches} "
        f"microbatches, {_kind(schedule)} placement"
    )
    print(text(timeline, width=max(40, width)))
    for name in OBJECTIVES:
        cost, bound = timeline.cost(name), answer.bounds[name]
        gap = (cost - bound) / bound if bound > 0 else 0.0
        print(
            f"{name:<5} cost {cost:.6g}, bound {bound:.6g}, gap {gap:.2%}; "
            f"bubble rate {timeline.bubble(name):.4f}, bound {_rate(answer, bound):.4f}"
            f"{'  <- objective' if name == found.objective else ''}"
        )
    print(f"peak memory in act of a full stage: {' '.join(f'{peak:.4g}' for peak in answer.peak)}")
    print(f"{found.status}, {found.seconds:.2f} s")


def _compare(given: Given, answer: Answer, names: str) -> None:
    rows: list[tuple[str, ...]] = [
        ("name", "placement", "stage", "sync", "gap", "peak", "seconds", "")
    ]
    rows.append(_row(answer, ""))
    for name in dict.fromkeys(part.strip() for part in names.split(",") if part.strip()):
        other = solve(
            name,
            given.costs,
            given.microbatches,
            None,
            given.args.objective,
            placements=PLACEMENTS,
            seed=given.args.seed,
            time_limit=given.args.time_limit,
        )
        note = ""
        try:
            check(other.schedule, given.costs_of(other.schedule.placement), given.budget)
        except MemoryBudgetError:
            note = "over the budget"
        rows.append(_row(_answer(given, other), note))
    sizes = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(size) for cell, size in zip(row, sizes, strict=True))
        print("  ".join(cells).rstrip())


def _row(answer: Answer, note: str) -> tuple[str, ...]:
    schedule, found = answer.schedule, answer.found
    return (
        schedule.name,
        _kind(schedule),
        f"{answer.timeline.bubble('stage'):.4f}",
        f"{answer.timeline.bubble('sync'):.4f}",
        f"{found.gap:.2%}",
        f"{max(answer.peak):.4g}",
        f"{found.seconds:.2f}",
        note,
    )


def _to_json(answer: Answer) -> dict[str, Any]:
    schedule, found, timeline = answer.schedule, answer.found, answer.timeline
    return {
        "schedule": schedule.name,
        "placement": _kind(schedule),
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "objective": found.objective,
        "bubble": {name: timeline.bubble(name) for name in OBJECTIVES},
        "cost": {name: timeline.cost(name) for name in OBJECTIVES},
        "bound": answer.bounds,
        "bubble_bound": {name: _rate(answer, answer.bounds[name]) for name in OBJECTIVES},
        "gap": found.gap,
        "peak": answer.peak,
        "seconds": found.seconds,
        "status": found.status,
    }
