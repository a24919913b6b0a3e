"""The fixed shapes, each with its table drawn above it, and the one place where names resolve."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from ..errors import ScheduleError
from .bidirectional import dualpipe
from .core import Action, Schedule, linear_placement
from .looped import interleaved, interleaved_zb
from .vshape import dualpipe_v, v_half, v_min, zb_v

Row = Iterator[tuple[str, int]]
Family = Callable[[int, int], Schedule]


# rank 0 |F0 F1 F2 F3 F4 .  .  .  .  .  .  B0=== B1=== B2=== B3=== B4===
# rank 1 |.  F0 F1 F2 F3 F4 .  .  .  B0=== B1=== B2=== B3=== B4=== .  .
# rank 2 |.  .  F0 F1 F2 F3 F4 B0=== B1=== B2=== B3=== B4=== .  .  .  .
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965): holds every microbatch."""
    return _linear("gpipe", ranks, microbatches, lambda _: _gpipe_row(microbatches))


def _gpipe_row(m: int) -> Row:
    yield from (("F", i) for i in range(m))
    yield from (("B", i) for i in range(m))


# rank 0 |F0 F1 F2 .  .  .  .  B0=== F3 B1=== F4 B2=== .  B3=== .  B4===
# rank 1 |.  F0 F1 .  .  B0=== F2 B1=== F3 B2=== F4 B3=== .  B4=== .  .
# rank 2 |.  .  F0 B0=== F1 B1=== F2 B2=== F3 B3=== F4 B4=== .  .  .  .
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Backward as early as it can be (1F1B, arXiv 1806.03377): stage s holds min(m, p - s)."""
    return _linear(
        "1f1b", ranks, microbatches, lambda left: _alternate("B", microbatches, warm_up=left)
    )


# rank 0 |F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
# rank 1 |.  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
# rank 2 |.  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2): 1F1B's memory, a third of its bubble.

    Rank s delays W by s microbatches behind I, so that W fills what 1F1B leaves idle at the end.
    """
    return _linear(
        "zb_h1",
        ranks,
        microbatches,
        lambda left: _delayed(microbatches, warm_up=left, delay=ranks - left),
    )


# rank 0 |F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
# rank 1 |.  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
# rank 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2 (arXiv 2401.10241, section 2): twice 1F1B's memory, no bubble if F = I = W.

    Rank s of p warms up with 2(p - s) - 1 forwards and delays W by 2s.
    """
    return _linear(
        "zb_h2",
        ranks,
        microbatches,
        lambda left: _delayed(microbatches, warm_up=2 * left - 1, delay=2 * (ranks - left)),
    )


def _delayed(m: int, warm_up: int, delay: int) -> Row:
    """I and F in turn; W follows `delay` microbatches behind I, before the next F.

    After F it would be one activation too late: the memory of W's stash must be free first.
    """
    for kind, i in _alternate("I", m, warm_up):
        yield kind, i
        if kind == "I" and i >= delay:
            yield "W", i - delay
    yield from (("W", i) for i in range(max(0, m - delay), m))


# rank 0 |F0 F1 F2 F3 F4 I0 F5 I1 .  I2 .  I3 .  I4 .  I5
# rank 1 |.  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 .  I4 .  I5 .
# rank 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 .  .
def forward_only(ranks: int, microbatches: int) -> Schedule:
    """The order of an evaluation step: F, and I as the loss's way back (no work, no bytes).

    Rank s of p runs at most 2(p - s) - 1 microbatches ahead of what came back: as many as are on
    their way there and back, so that nothing waits and the work in flight does not grow with m.
    """
    return _linear(
        "forward_only",
        ranks,
        microbatches,
        lambda left: _alternate("I", microbatches, warm_up=2 * left - 1),
    )


def evaluation(schedule: Schedule) -> Schedule:
    """An evaluation order for the placement of `schedule`: `forward_only` where it is linear.

    Else the order of the training step without its W: what can run with them can run without.
    """
    if schedule.placement == linear_placement(schedule.ranks):
        return forward_only(schedule.ranks, schedule.microbatches)
    rows = tuple(
        tuple(a if a.kind == "F" else a._replace(kind="I") for a in row if a.kind != "W")
        for row in schedule.rows
    )
    return Schedule(rows, schedule.microbatches, schedule.placement, "evaluation")


def _alternate(backward: str, m: int, warm_up: int) -> Row:
    """`warm_up` forwards, then backward and forward in turn, each ascending."""
    warm_up = min(m, warm_up)
    yield from (("F", i) for i in range(warm_up))
    for i in range(m):
        yield backward, i
        if warm_up + i < m:
            yield "F", warm_up + i


def _linear(name: str, ranks: int, microbatches: int, row: Callable[[int], Row]) -> Schedule:
    """One stage a rank; `row` makes a rank's actions from the number of stages left, p - s."""
    for argument, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise ScheduleError(f"{argument} = {value}: want at least 1")
    rows = tuple(
        tuple(Action(stage, kind, i) for kind, i in row(ranks - stage)) for stage in range(ranks)
    )
    return Schedule(rows, microbatches, linear_placement(ranks), name)


FAMILIES: dict[str, Family] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved": interleaved,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
    "dualpipe": dualpipe,
}

# One stage a rank, in order; the others have several, or copies.
LINEAR = ("gpipe", "1f1b", "zb_h1", "zb_h2")

ALIASES = {
    "one_f_one_b": "1f1b",
    "zb1p": "zb_h1",
    "zb2p": "zb_h2",
    "interleaved_1f1b": "interleaved",
    "interleaved_zero_bubble": "interleaved_zb",
    "zbv": "zb_v",
}


def resolve(name: str) -> str:
    """The canonical name of a family: `ZB-H1`, `zbh1` and `zb1p` are all `zb_h1`.

    Raises ScheduleError on an unknown one, naming the nearest and all that there are.
    """
    known = {_bare(family): family for family in FAMILIES}
    known |= {_bare(alias): family for alias, family in ALIASES.items()}
    if _bare(name) in known:
        return known[_bare(name)]
    names = [*FAMILIES, *ALIASES]
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    raise ScheduleError(
        f"schedule = {name!r}: did you mean {nearest!r}? There are {', '.join(names)}"
    )


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "_- ")


def build(name: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule of a family, by any spelling of its name that `resolve` takes."""
    return FAMILIES[resolve(name)](ranks, microbatches)
