"""A self-contained HTML report: summary table, planned over measured timelines, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from ..schedule.render import COLOURS, GAP, LABEL, LANE, NAMES, lanes
from ..timeline import Timeline

_WIDTH = 1200
_RIGHT = 140  # room for the peaks beside the memory curves
_AXIS = 22
_CURVE = 30

_CAPTIONS = {
    "simulated": "planned (simulated)",
    "measured": "measured",
    "virtual": "measured on the virtual device (sleeps, no model)",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --dim: #667; --line: #ccd; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ec; --dim: #9aa; --line: #445; --paper: #15181f; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1240px; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
.notes, .dim { color: var(--dim); }
.legend span { display: inline-block; margin-right: 1.2rem; }
.legend i { display: inline-block; width: .9em; height: .9em; margin-right: .4em;
  vertical-align: -.1em; }
svg { width: 100%; min-width: 700px; height: auto; display: block; font: 11px system-ui; }
svg text { fill: var(--ink); } svg text.digits { fill: #111; } svg .dim { fill: var(--dim); }
svg rect[class] { stroke: var(--paper); stroke-width: .6; }
svg rect[class]:hover { stroke: var(--ink); stroke-width: 1.5; }
.transfer { fill: var(--dim); background: var(--dim); }
.axis line { stroke: var(--line); }
.planned { fill: #56b4e9; fill-opacity: .25; stroke: #56b4e9; }
.measured { fill: none; stroke: #d55e00; stroke-width: 1.5; }
#tip { position: fixed; display: none; white-space: pre; pointer-events: none; z-index: 1;
  background: var(--ink); color: var(--paper); padding: .3rem .6rem; border-radius: 4px;
  font-size: 13px; }
""" + "".join(
    f".{kind} {{ fill: {colour}; background: {colour}; }}\n" for kind, colour in COLOURS.items()
)

# Without this script the browser's own tooltips show the titles; with it they show at once.
_SCRIPT = """
const tip = document.getElementById('tip');
for (const title of document.querySelectorAll('rect > title')) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
document.addEventListener('mousemove', event => {
  const text = event.target.dataset ? event.target.dataset.tip : undefined;
  tip.style.display = text ? 'block' : 'none';
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + 'px';
});
"""


@dataclass(frozen=True)
class Entry:
    """One schedule of a report; `values` is its row of the summary table, by column."""

    name: str
    planned: Timeline
    measured: Timeline | None = None
    values: Mapping[str, str] = field(default_factory=dict)


def html(title: str, entries: Sequence[Entry], notes: Sequence[str] = ()) -> str:
    """The whole document as text: no other file and no network is needed to look at it.

    Each entry's planned and measured timeline are drawn on one time axis, both from their own
    first action on, with the memory of each rank beneath; hovering shows action and times.
    All text is escaped.
    """
    body = "\n".join(section for entry in entries for section in _entry(entry))
    remarks = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<div class="scroll">{_table(entries)}</div>
<div class="notes">{remarks}</div>
{_legend(entries)}
{body}
<div id="tip"></div>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _table(entries: Sequence[Entry]) -> str:
    columns = list(dict.fromkeys(column for entry in entries for column in entry.values))
    head = "".join(f"<th>{escape(column)}</th>" for column in ["schedule", *columns])
    rows = "".join(
        f"<tr><td>{escape(entry.name)}</td>"
        + "".join(f"<td>{escape(entry.values.get(column, '–'))}</td>" for column in columns)
        + "</tr>\n"
        for entry in entries
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>"


def _timelines(entry: Entry) -> list[Timeline]:
    return [entry.planned] if entry.measured is None else [entry.planned, entry.measured]


def _legend(entries: Sequence[Entry]) -> str:
    spans = [span for e in entries for timeline in _timelines(e) for span in timeline.spans]
    used = {span.action.kind for span in spans if span.action and span.lane == "compute"}
    keys = [(kind, f"{kind} {NAMES[kind]}") for kind in COLOURS if kind in used]
    if any(span.lane != "compute" for span in spans):
        keys.append(("transfer", "transfer"))
    items = "".join(f'<span><i class="{kind}"></i>{escape(name)}</span>' for kind, name in keys)
    return f'<p class="legend">{items}<span class="dim">digits: microbatch</span></p>'


def _entry(entry: Entry) -> Iterator[str]:
    timelines = _timelines(entry)
    seconds = max(max(timeline.makespan() for timeline in timelines), 1e-12)
    scale = (_WIDTH - LABEL - _RIGHT) / seconds
    yield f"<section>\n<h2>{escape(entry.name)}</h2>"
    for timeline in timelines:
        bubbles = f"bubble {timeline.bubble('stage'):.2%} (stage), {timeline.bubble('sync'):.2%}"
        step = f"{1e3 * timeline.makespan():.2f} ms, {bubbles} (sync)"
        caption = f"{_CAPTIONS[timeline.kind]} <span class='dim'>{step}</span>"
        height = timeline.ranks * (LANE + GAP)
        yield f'<h3>{caption}</h3>\n<div class="scroll">{_open_svg(height + _AXIS)}'
        yield from _axis(seconds, scale, height)
        yield from lanes(timeline, scale)
        yield "</svg></div>"
    if any(any(timeline.memory) for timeline in timelines):
        yield from _memory(timelines, seconds, scale)
    yield "</section>"


def _open_svg(height: float) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">'


def _axis(seconds: float, scale: float, height: float) -> Iterator[str]:
    """Time marks every 1, 2 or 5 times a power of ten, at most 12 of them."""
    power = 10.0
    while power > seconds:
        power /= 10
    while power * 10 <= seconds:
        power *= 10
    step = next(power * part for part in (0.1, 0.2, 0.5, 1.0) if seconds / (power * part) <= 12)
    yield '<g class="axis">'
    for mark in range(int(seconds / step) + 1):
        x = LABEL + mark * step * scale
        yield f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height:.0f}"/>'
        yield (
            f'<text class="dim" x="{x:.1f}" y="{height + 14:.0f}" text-anchor="middle">'
            f"{1e3 * mark * step:g} ms</text>"
        )
    yield "</g>"


def _memory(timelines: Sequence[Timeline], seconds: float, scale: float) -> Iterator[str]:
    """A curve a rank, all on one scale; the planned one filled, the measured one a line."""
    most = max(timeline.peak(rank) for timeline in timelines for rank in range(timeline.ranks))
    ranks = max(timeline.ranks for timeline in timelines)
    height = ranks * (_CURVE + GAP)
    yield (
        "<h3>activations and stash held <span class='dim'>planned filled, measured as a line; "
        "beside it the peaks, planned / measured</span></h3>"
    )
    yield f'<div class="scroll">{_open_svg(height + _AXIS)}'
    yield from _axis(seconds, scale, height)
    for rank in range(ranks):
        floor = rank * (_CURVE + GAP) + _CURVE
        yield f'<text x="4" y="{floor - 4:.0f}">rank {rank}</text>'
        known = [timeline for timeline in timelines if timeline.memory[rank]]
        for timeline in known:
            style = "planned" if timeline.kind == "simulated" else "measured"
            path = _staircase(timeline, rank, scale, floor, _CURVE / most if most else 0.0)
            yield f'<path class="{style}" d="{path}"/>'
        peaks = " / ".join(_bytes(timeline.peak(rank)) for timeline in known)
        yield f'<text class="dim" x="{_WIDTH - _RIGHT + 6}" y="{floor - 4:.0f}">{peaks}</text>'
    yield "</svg></div>"


def _staircase(timeline: Timeline, rank: int, scale: float, floor: float, per_byte: float) -> str:
    """The path of one rank's curve, from the ground at its first point back to it at its last."""
    rows = [timeline.compute(each) for each in range(timeline.ranks)]
    origin = min((row[0].start for row in rows if row), default=0.0)
    points = [
        (LABEL + (time - origin) * scale, floor - held * per_byte)
        for time, held in timeline.memory[rank]
    ]
    steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in points)
    return f"M{points[0][0]:.1f} {floor:.0f}{steps}V{floor:.0f}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
