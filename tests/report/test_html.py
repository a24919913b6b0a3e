"""The report: well-formed, complete, escaped, and in need of nothing else."""

import re
from html.parser import HTMLParser

import pytest

from zbpipe.costs import Costs
from zbpipe.report import Entry, html
from zbpipe.schedule import build
from zbpipe.schedule.render import describe
from zbpipe.schedule.simulate import simulate
from zbpipe.timeline import Span, Timeline

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers texts by the tag they stand in."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.tags = [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data


def measured(planned, kind="measured"):
    """The plan 5% slower, on another clock, with the sends that a real step has."""
    spans = []
    for span in planned.spans:
        late = span._replace(start=50 + 1.05 * span.start, end=50 + 1.05 * span.end)
        spans += [late, Span(span.rank, "send:1", span.action, late.end, late.end + 0.01)]
    memory = tuple(tuple((50 + 1.05 * t, held) for t, held in row) for row in planned.memory)
    return Timeline(tuple(spans), planned.ranks, memory, kind)


def entry(name, kind="measured", **values):
    costs = Costs.uniform(3, f=0.1, i=0.11, w=0.12, act=3e8, stash=1e8)
    planned = simulate(build(name, 3, 5), costs)
    return Entry(name, planned, measured(planned, kind), values)


def test_every_span_of_plan_and_measurement_is_drawn_and_described():
    entries = [entry("1f1b"), entry("zb_h1")]
    page = Page(html("Report", entries))
    expected = [
        describe(span, origin)
        for one in entries
        for timeline, origin in ((one.planned, 0.0), (one.measured, 50.0))
        for span in timeline.spans
    ]
    assert page.texts["title"][1:] == expected
    assert page.texts["h2"] == ["1f1b", "zb_h1"]


def test_plan_and_measurement_share_one_time_axis():
    one = entry("zb_h2")
    page = Page(html("Report", [one]))
    bars = [a for tag, a in page.tags if tag == "rect" and a.get("class") in ("F", "I", "W", "B")]
    planned, real = bars[: len(one.planned.spans)], bars[len(one.planned.spans) :]
    assert len(real) == len(planned)
    for ours, theirs in zip(planned, real, strict=True):
        assert float(theirs["width"]) == pytest.approx(1.05 * float(ours["width"]), abs=0.02)
        assert float(theirs["x"]) - 64 == pytest.approx(1.05 * (float(ours["x"]) - 64), abs=0.02)
    assert all(float(bar["x"]) + float(bar["width"]) <= 1200 for bar in bars)


def test_the_table_has_every_column_of_every_row():
    page = Page(html("R", [entry("1f1b", step="1 s"), entry("zb_h1", step="2 s", bubble="3%")]))
    assert page.texts["th"] == ["schedule", "step", "bubble"]
    assert page.texts["td"] == ["1f1b", "1 s", "–", "zb_h1", "2 s", "3%"]


def test_memory_is_drawn_for_each_rank_with_its_peaks():
    page = Page(html("Report", [entry("1f1b")]))
    curves = [attributes["class"] for tag, attributes in page.tags if tag == "path"]
    assert curves == ["planned", "measured"] * 3
    assert [text for text in page.texts["text"] if "MiB" in text] == [
        "858 MiB / 858 MiB",
        "572 MiB / 572 MiB",
        "286 MiB / 286 MiB",
    ]


def test_a_plan_alone_and_one_without_memory():
    planned = simulate(build("gpipe", 2, 2), Costs.uniform(2))
    page = Page(html("Report", [Entry("gpipe", Timeline(planned.spans, 2))]))
    assert len(page.texts["title"]) == 1 + len(planned.spans)
    assert not [tag for tag, _ in page.tags if tag == "path"]
    assert "measured" not in "".join(page.texts["h3"])


@pytest.mark.parametrize("timeline", [Timeline((), 1), Timeline((), 1, (((0.0, 0.0),),))])
def test_nothing_ran(timeline):
    Page(html("Report", [Entry("empty", timeline, timeline)]))
    Page(html("Report", []))


def test_virtual_measurements_say_so():
    headings = " ".join(Page(html("Report", [entry("1f1b", kind="virtual")])).texts["h3"])
    assert "virtual device" in headings


def test_text_is_escaped():
    nasty = '<script>alert("1")</script>&amp;'
    entries = [Entry(nasty, entry("1f1b").planned, None, {nasty: nasty})]
    document = html(nasty, entries, notes=[nasty])
    page = Page(document)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert page.texts["h1"] == [nasty]
    assert page.texts["title"][0] == nasty
    assert page.texts["h2"] == [nasty]
    assert page.texts["td"] == [nasty, nasty]
    assert page.texts["th"][1] == nasty
    assert page.texts["p"][0] == nasty


def test_the_file_needs_nothing_from_outside():
    document = html("Report", [entry("zb_h1")])
    assert not re.search(r"""https?:|@import|url\(|\bsrc=|\bhref=""", document)
