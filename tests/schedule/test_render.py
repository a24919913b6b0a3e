"""Pictures of schedules and timelines."""

import xml.etree.ElementTree as ET

import pytest

from zbpipe.costs import Costs
from zbpipe.schedule import LINEAR, Action, Schedule, build
from zbpipe.schedule.render import describe, svg, text
from zbpipe.schedule.simulate import simulate
from zbpipe.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def test_stages_are_named_where_a_rank_has_several():
    v = Schedule.from_csv("0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1B0\n")
    assert (
        text(v)
        == """\
rank 0 |0F0 .   .   3F0 3I0 3W0 .   .   .   0B0====
rank 1 |.   1F0 2F0 .   .   2B0==== 1B0==== .   ."""
    )


def test_a_timeline_is_drawn_to_scale_from_its_first_action():
    spans = (
        Span(0, "compute", Action(0, "F", 10), 100.0, 100.2),
        Span(0, "send:1", Action(0, "F", 10), 100.2, 100.9),
        Span(1, "compute", Action(1, "F", 10), 100.4, 100.5),
    )
    timeline = Timeline(spans, 2, kind="measured")
    assert (
        text(timeline, unit=0.1)
        == """\
rank 0 |F10==== .   .   .
rank 1 |.   .   .   .   F10"""
    )
    assert text(timeline, unit=0.2) == "rank 0 |F10 .   .\nrank 1 |.   .   F10"


def test_no_action_vanishes_however_short():
    spans = [Span(0, "compute", Action(0, "F", i), i * 1e-9, (i + 1) * 1e-9) for i in range(5)]
    spans += [Span(0, "compute", Action(0, "I", i), 1.0 + i, 2.0 + i) for i in range(9)]
    drawn = text(Timeline(tuple(spans), 1), width=1000)
    assert all(str(span.action)[1:] in drawn for span in spans)


def test_an_idle_rank_and_an_empty_timeline():
    lone = Span(1, "compute", Action(1, "F", 0), 0.0, 2.0)
    assert text(Timeline((lone,), 2), unit=1.0) == "rank 0 |.  .\nrank 1 |F0==="
    assert text(Timeline((), 2)) == "rank 0 |\nrank 1 |"


def test_a_big_picture_is_truncated_and_says_by_how_much():
    assert (
        text(build("zb_h1", 12, 20), width=40, height=2)
        == """\
rank 0  |F0  F1  F2  F3  F4  F5  F6  …
rank 1  |.   F0  F1  F2  F3  F4  F5  …
… 64 of 71 time units more
… 10 of 12 ranks more"""
    )


@pytest.mark.parametrize("width", [1, 20, 57, 119, 120])
@pytest.mark.parametrize("name", LINEAR)
def test_rows_keep_to_the_width(name, width):
    lines = text(build(name, 4, 16), width=width).splitlines()[:4]
    narrowest = len("rank 0 |F15 …")
    assert all(len(line) <= max(width, narrowest) for line in lines)


@pytest.mark.parametrize("name", LINEAR)
def test_svg_is_well_formed_and_holds_every_span_to_scale(name):
    timeline = simulate(build(name, 3, 4), Costs.uniform(3, comm=0.25))
    root = ET.fromstring(svg(timeline, width=864))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert len(bars) == len(timeline.spans)
    scale = (864 - 64) / timeline.makespan()
    for bar, span in zip(bars, timeline.spans, strict=True):
        assert bar.get("class") == span.action.kind
        assert bar.find(f"{SVG}title").text == describe(span)
        assert float(bar.get("x")) == pytest.approx(64 + span.start * scale, abs=0.01)
        assert float(bar.get("width")) == pytest.approx((span.end - span.start) * scale, abs=0.01)
    assert "(simulated)" in "".join(root.itertext())


def test_a_span_is_described_in_milliseconds():
    span = Span(1, "send:2", Action(3, "I", 7), 2.0015, 2.002)
    assert describe(span, origin=2.0) == (
        "rank 1 · send:2 · stage 3 · I input-grad · microbatch 7\n"
        "start 1.500 ms · end 2.000 ms · 0.500 ms"
    )
