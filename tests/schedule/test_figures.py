"""Known figures of the families, each from zbpipe's own simulator, to the digits printed."""

import csv
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from zbpipe.costs import Costs, layer_bytes
from zbpipe.schedule import build
from zbpipe.schedule.simulate import microbatches_held, planned_peak, simulate

BOTH = pytest.mark.parametrize("name", ["gpipe", "1f1b"])

# F 1, backward 2, unless said.
BACKWARD_2 = {"f": 1.0, "i": 1.0, "w": 1.0}
ONE_CELL = {"f": 1.0, "i": 1.0, "w": 0.0}

PAPER = Path(__file__).with_name("paper_bubbles.csv")


def printed(value, digits):
    """Rounded half up, as on paper; float noise below 1e-9 does not decide a half."""
    exact = Decimal(repr(round(value, 9)))
    return str(exact.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))


def run(name, p, m, **costs):
    return simulate(build(name, p, m), Costs.uniform(p, **(costs or BACKWARD_2)))


@BOTH
@pytest.mark.parametrize(
    ("p", "m", "percent", "digits"),
    [(4, 8, "37.5", 1), (4, 32, "9.4", 1), (8, 32, "22", 0), (8, 8, "88", 0)],
)
def test_bubble_overhead(name, p, m, percent, digits):
    assert printed(100 * run(name, p, m).overhead(), digits) == percent


RATES = [(4, 4, "42.9", 1), (4, 8, "27", 0), (8, 8, "47", 0), (8, 32, "18", 0)]
RATES += [
    (p, m, rate, 1)
    for p, line in {
        4: "75.0 60.0 42.9 27.3 15.8 8.6 4.5",
        8: "87.5 77.8 63.6 46.7 30.4 17.9 9.9",
        16: "93.8 88.2 78.9 65.2 48.4 31.9 19.0",
    }.items()
    for m, rate in zip([1, 2, 4, 8, 16, 32, 64], line.split(), strict=True)
]


@BOTH
@pytest.mark.parametrize(("p", "m", "percent", "digits"), RATES)
def test_bubble_rate(name, p, m, percent, digits):
    for objective in ("stage", "sync"):
        assert printed(100 * run(name, p, m).bubble(objective), digits) == percent


@BOTH
@pytest.mark.parametrize("p", [4, 8, 16])
def test_rate_and_makespan_are_the_formula_for_every_m(name, p):
    for m in range(1, 65):
        timeline = run(name, p, m)
        assert abs(timeline.bubble() - (p - 1) / (m + p - 1)) < 1e-12
        assert timeline.makespan() == (m + p - 1) * 3


@BOTH
def test_ten_percent_needs_nine_microbatches_a_further_rank(name):
    assert run(name, 8, 63).bubble() == pytest.approx(0.1, abs=1e-15)
    assert run(name, 8, 64).bubble() < 0.0999
    assert run(name, 8, 62).bubble() > 0.1001


@BOTH
@pytest.mark.parametrize(
    ("m", "costs", "makespan", "idle"),
    [
        (8, ONE_CELL, 22, 6),
        (1, {"f": 4.0, "i": 4.0, "w": 4.0}, 48, 36),  # the batch not split: 75% idle
        (4, BACKWARD_2, 21, 9),
        (8, BACKWARD_2, 33, 9),
        (16, BACKWARD_2, 57, 9),
    ],
)
def test_cells_and_idle_cells_of_four_stages(name, m, costs, makespan, idle):
    timeline = run(name, 4, m, **costs)
    assert timeline.makespan() == makespan
    assert [timeline.makespan() - timeline.busy(rank) for rank in range(4)] == [idle] * 4


@pytest.mark.parametrize(
    ("name", "m", "held"),
    [("gpipe", 16, (16, 16, 16, 16)), ("1f1b", 16, (4, 3, 2, 1)), ("gpipe", 32, (32,) * 4)],
)
def test_microbatches_held(name, m, held):
    assert microbatches_held(build(name, 4, m)) == held


def test_1f1b_holds_an_eighth_of_gpipe_at_32_microbatches():
    ours, theirs = (max(microbatches_held(build(name, 4, 32))) for name in ("1f1b", "gpipe"))
    assert theirs / ours == 8


def test_zero_bubble_keeps_its_caps_of_unfinished_backwards():
    assert max(microbatches_held(build("zb1p", 4, 32), "W")) == 4
    assert max(microbatches_held(build("zb2p", 4, 32), "W")) <= 8


def layers(count):
    """act of so many layers: sequence 8192, batch 1, hidden 4096, flash attention."""
    return count * layer_bytes(sequence=8192, batch=1, hidden=4096)[0]


@pytest.mark.parametrize(
    ("count", "gigabytes", "digits"), [(1, "1.1409", 4), (9, "10.3", 1), (36, "41.07", 2)]
)
def test_activations_of_layers(count, gigabytes, digits):
    assert printed(layers(count) / 1e9, digits) == gigabytes


@pytest.mark.parametrize(
    ("name", "m", "gigabytes"),
    [("1f1b", 16, ["41", "31", "21", "10"]), ("gpipe", 8, ["82"] * 4)],
)
def test_peaks_of_36_layers_on_four_stages(name, m, gigabytes):
    schedule, costs = build(name, 4, m), Costs.uniform(4, act=layers(9), stash=0.0)
    timeline = simulate(schedule, costs)
    assert [printed(timeline.peak(rank) / 1e9, 0) for rank in range(4)] == gigabytes
    assert [planned_peak(schedule, costs, rank) for rank in range(4)] == [
        timeline.peak(rank) for rank in range(4)
    ]


@BOTH
def test_recomputing_the_forward_costs_a_third(name):
    plain, again = run(name, 4, 8), run(name, 4, 8, f=1.0, i=2.0, w=1.0)
    assert printed(100 * (again.makespan() / plain.makespan() - 1), 0) == "33"


def paper_rows():
    lines = PAPER.read_text().splitlines()[1:]
    return [
        pytest.param(row, name, row[column], id=f"{row['model']}-m{row['m']}-{name}")
        for row in csv.DictReader(lines)
        for name, column in [
            ("1f1b", "paper_1f1b"),
            ("zb_h1", "paper_zb_h1"),
            ("zb_h2", "paper_zb_h2"),
        ]
    ]


@pytest.mark.parametrize(("row", "name", "rate"), paper_rows())
def test_the_papers_bubble_rates(row, name, rate):
    f, i, w, comm = (1e-6 * int(row[key]) for key in ("tf_us", "tb_us", "tw_us", "tcomm_us"))
    timeline = run(name, int(row["p"]), int(row["m"]), f=f, i=i, w=w, comm=comm)
    assert printed(timeline.bubble("stage"), 4) == printed(float(rate), 4)


def test_all_twelve_rows_of_the_paper_are_here():
    assert len(paper_rows()) == 36
