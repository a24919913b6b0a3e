"""Draw a schedule or a timeline: as a text grid, or as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from ..costs import Costs
from ..timeline import Span, Timeline
from .core import Schedule
from .simulate import simulate

# Okabe and Ito's palette: told apart by readers with any of the common colour blindnesses.
COLOURS = {"F": "#56b4e9", "I": "#e69f00", "W": "#009e73", "B": "#cc79a7"}
NAMES = {"F": "forward", "I": "input-grad", "W": "weight-grad", "B": "backward, I + W"}
NAMES |= {"R": "tied gradient, handed over", "S": "tied gradients, summed"}

LANE, GAP, LABEL = 24, 8, 64
_LEGEND = 28
_STRIP = 3  # height of a transfer's bar, under the compute lane
_DIGITS_FROM = 14.0  # a bar narrower than this has no room for a microbatch's number


def text(
    drawn: Timeline | Schedule, width: int = 120, height: int = 32, unit: float | None = None
) -> str:
    """One row a rank, one cell a time unit: `F0`, `=` where it lasts on, `.` where it idles.

    A Schedule is drawn with F, I, W of one unit and B of two. Of a Timeline a cell is `unit`
    seconds, by default its shortest action (but a quarter of the median at least), and no action
    gets less than a cell. Labels name the stage (`4F0`) where a rank has several. At most `width`
    columns and `height` ranks are drawn; what is cut off is counted beneath.
    """
    if isinstance(drawn, Schedule):
        drawn, unit = simulate(drawn, Costs.uniform(drawn.stages)), 1.0
    rows = [drawn.compute(rank) for rank in range(drawn.ranks)]
    spans = [span for row in rows for span in row]
    unit = unit or _default_unit(spans)
    origin = min((span.start for span in spans), default=0.0)
    staged = any(len({span.action.stage for span in row if span.action}) > 1 for row in rows)
    size = 1 + max((len(_label(span, staged)) for span in spans), default=1)
    places = [_places(row, origin, unit) for row in rows]
    cells = max((place[-1][1] for place in places if place), default=0)

    head = len(f"rank {drawn.ranks - 1} |")
    fits = max(1, (width - head) // size)
    if fits < cells:
        fits = max(1, (width - head - len("…")) // size)
    lines = []
    for rank in range(min(height, drawn.ranks)):
        labels = [_label(span, staged) for span in rows[rank]]
        row = _row(labels, places[rank], cells, size)
        tail = row[: fits * size] + "…" if fits < cells else row
        lines.append(f"{f'rank {rank}':<{head - 1}}|{tail}".rstrip())
    if fits < cells:
        lines.append(f"… {cells - fits} of {cells} time units more")
    if height < drawn.ranks:
        lines.append(f"… {drawn.ranks - height} of {drawn.ranks} ranks more")
    return "\n".join(lines)


def _default_unit(spans: Sequence[Span]) -> float:
    lengths = [span.end - span.start for span in spans if span.end > span.start]
    return max(min(lengths), median(lengths) / 4) if lengths else 1.0


def _label(span: Span, staged: bool) -> str:
    if span.action is None:
        return "?"
    return str(span.action) if staged else f"{span.action.kind}{span.action.microbatch}"


def _places(row: Sequence[Span], origin: float, unit: float) -> list[tuple[int, int]]:
    """First and past-the-last cell of each span; short ones push the next to the right."""
    places, cursor = [], 0
    for span in row:
        first = max(cursor, int((span.start - origin) / unit + 0.5))
        cursor = max(first + 1, int((span.end - origin) / unit + 0.5))
        places.append((first, cursor))
    return places


def _row(labels: Sequence[str], places: Sequence[tuple[int, int]], cells: int, size: int) -> str:
    idle = ".".ljust(size)
    line, cursor = [], 0
    for label, (first, past) in zip(labels, places, strict=True):
        line.append(idle * (first - cursor))
        fill = "=" if past - first > 1 else " "
        line.append(label.ljust((past - first) * size - 1, fill) + " ")
        cursor = past
    return "".join([*line, idle * (cells - cursor)])


def svg(timeline: Timeline, width: int = 1200) -> str:
    """A picture of its own, `width` pixels wide: a lane a rank, a legend, times on hover."""
    height = timeline.ranks * (LANE + GAP) + _LEGEND
    scale = (width - LABEL) / max(timeline.makespan(), 1e-12)
    kinds = sorted({span.action.kind for span in timeline.spans if span.action})
    fills = "".join(f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
            f"<style>{fills}.transfer{{fill:#888}}text{{fill:#222}}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *lanes(timeline, scale),
            *_legend(kinds, height - _LEGEND + 6, timeline.kind),
            "</svg>\n",
        ]
    )


def _legend(kinds: Sequence[str], top: float, kind: str) -> Iterator[str]:
    left = float(LABEL)
    for letter in kinds:
        name = f"{letter} {NAMES[letter]}"
        yield f'<rect class="{letter}" x="{left}" y="{top}" width="12" height="12"/>'
        yield f'<text x="{left + 16}" y="{top + 10}">{escape(name)}</text>'
        left += 40 + 7 * len(name)
    yield f'<text x="{left}" y="{top + 10}">({escape(kind)})</text>'


def lanes(timeline: Timeline, scale: float, top: float = 0.0) -> Iterator[str]:
    """SVG elements of every span, `scale` pixels a second, time 0 at the first compute span.

    Computing is a bar in the rank's lane, of class F, I, W or B; a transfer is a thin strip under
    it. Every one carries a <title> with its action and its times in milliseconds.
    """
    rows = [timeline.compute(rank) for rank in range(timeline.ranks)]
    origin = min((row[0].start for row in rows if row), default=0.0)
    for rank in range(timeline.ranks):
        middle = top + rank * (LANE + GAP) + LANE / 2 + 4
        yield f'<text x="4" y="{middle:.0f}">rank {rank}</text>'
    for span in timeline.spans:
        yield _bar(span, origin, scale, top + span.rank * (LANE + GAP))


def _bar(span: Span, origin: float, scale: float, top: float) -> str:
    left, length = LABEL + (span.start - origin) * scale, (span.end - span.start) * scale
    computes = span.lane == "compute"
    kind = span.action.kind if computes and span.action else "transfer"
    y, height = (top, LANE) if computes else (top + LANE + 1, _STRIP)
    bar = (
        f'<rect class="{kind}" x="{left:.2f}" y="{y:.0f}" width="{length:.2f}" '
        f'height="{height}"><title>{escape(describe(span, origin))}</title></rect>'
    )
    if not computes or span.action is None or length < _DIGITS_FROM:
        return bar
    digits = (
        f'<text class="digits" x="{left + length / 2:.2f}" y="{top + LANE / 2 + 4:.0f}" '
        f'text-anchor="middle" pointer-events="none">{span.action.microbatch}</text>'
    )
    return bar + digits


def describe(span: Span, origin: float = 0.0) -> str:
    """Two lines on a span: what it does, and when, in milliseconds from `origin` (seconds) on."""
    what = [f"rank {span.rank}"]
    if span.lane != "compute":
        what.append(span.lane)
    if span.action is not None:
        stage, kind, microbatch = span.action
        what += [f"stage {stage}", f"{kind} {NAMES[kind]}", f"microbatch {microbatch}"]
    start, end = (1e3 * (time - origin) for time in (span.start, span.end))
    return f"{' · '.join(what)}\nstart {start:.3f} ms · end {end:.3f} ms · {end - start:.3f} ms"
