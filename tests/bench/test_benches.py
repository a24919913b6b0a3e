"""Every bench runs, small, and writes what it promises; what the numbers are is not asked here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from zbpipe.schedule import build
from zbpipe.schedule.core import Action
from zbpipe.timeline import Span, Timeline

BENCH = Path(__file__).parents[2] / "bench"

# Arguments of a small run, and keys of its JSON that hold a number.
SMALL = {
    "bubble": (["--quick"], []),
    "hf_vs_torch": (["--quick"], ["ratio_vs_torch_1f1b"]),
    "executor_overhead": (["--repeats", "1"], ["native_us", "callback_us"]),
    "gpu_check": (["--only", "doctor"], []),  # the rest: test_gpu_check.py
    "runtime_vs_torch": (
        ["--quick"],
        [
            "ratio_vs_torch_1f1b",
            "ratio_vs_torch_best",
            "virtual_over_simulated",
            "virtual_1mib_over_simulated",
        ],
    ),
    "roofline": ([], ["grouping_saves_at_most"]),
    "schedule_quality": (["--quick"], []),
    "split_overhead": (
        ["--pairs", "10", "--hidden", "32", "--sequence", "8", "--batch", "1", "--bar", "1e9"],
        ["fused_ms", "iw_ms", "overhead"],
    ),
    "transport": (
        ["--repeats", "1"],
        ["latency_64kib_us", "latency_1mib_us", "throughput_16mib_gbs"],
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """`written(name)`: the JSON of a bench's small run."""
    known = {}

    def run(name: str):
        if name not in known:
            path = tmp_path_factory.mktemp(name) / "out.json"
            command = [sys.executable, BENCH / f"{name}.py", *SMALL[name][0], "--json", path]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            known[name] = json.loads(path.read_text())
        return known[name]

    return run


def test_every_bench_is_here():
    runnable = {p.stem for p in BENCH.glob("*.py") if '__name__ == "__main__"' in p.read_text()}
    assert runnable == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_the_promised_figures_are_there(written, name):
    result = written(name)
    figures = {key: result[key] for key in SMALL[name][1]}
    assert all(isinstance(f, float) and math.isfinite(f) for f in figures.values()), figures


@pytest.mark.parametrize("name", ["runtime_vs_torch", "hf_vs_torch", "bubble"])
def test_both_runtimes_compute_the_unsplit_models_gradients(written, name):
    result = written(name)
    rows = result["microbatches"]["4"] if name == "bubble" else result.get("real", result)["rows"]
    differences = {k: r["grad_max_diff"] for k, r in rows.items()}
    assert {name.split()[0] for name in differences} == {"zbpipe", "torch"}
    assert max(differences.values()) < 1e-5  # fp32 noise: 3e-7 was seen


def test_sleeps_take_no_less_than_simulated(written):
    for name, row in written("runtime_vs_torch")["virtual"].items():
        assert row["sync"]["ratio"] > 1, name


def test_bubbles_are_planned_and_measured(written):
    rows = written("bubble")["microbatches"]["4"]
    ours = {name: row for name, row in rows.items() if name.startswith("zbpipe")}
    for name, row in ours.items():
        assert 0 < row["bubble_measured"] < 1 and 0 <= row["bubble_planned"] < 1, name
        assert row["p2p_exposed_s"] >= 0 and min(row["held_bytes"]) > 0, name
    assert all(min(row["tokens_s"]) > 0 and min(row["peak_bytes"]) > 0 for row in rows.values())


def test_exposed_is_the_idle_time_in_which_the_message_is_on_its_way(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from bubble import exposed

    schedule = build("gpipe", 2, 2)
    spans = [
        Span(0, "compute", Action(0, "F", 0), 0.0, 1.0),
        Span(0, "compute", Action(0, "F", 1), 1.0, 2.0),
        Span(1, "recv:0", Action(0, "F", 0), 1.5, 1.5),
        Span(1, "recv:0", Action(0, "F", 1), 2.25, 2.25),
        Span(1, "compute", Action(1, "F", 0), 1.5, 1.75),  # the first: not idle before
        Span(1, "compute", Action(1, "F", 1), 2.5, 3.0),  # idle from 1.75, on its way 2 to 2.25
        Span(1, "compute", Action(1, "B", 0), 3.0, 4.0),
        Span(0, "recv:1", Action(1, "B", 0), 6.0, 6.0),
        Span(0, "compute", Action(0, "B", 0), 5.5, 6.5),  # idle from 2, on its way 4 to 5.5
    ]
    assert exposed(Timeline(tuple(spans), 2, kind="measured"), schedule) == 0.25 + 1.5
