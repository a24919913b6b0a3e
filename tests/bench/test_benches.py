"""Every bench runs, small, and writes what it promises; what the numbers are is not asked here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

# Arguments of a small run, and keys of its JSON that hold a number.
SMALL = {
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


@pytest.mark.parametrize("name", ["runtime_vs_torch", "hf_vs_torch"])
def test_both_runtimes_compute_the_unsplit_models_gradients(written, name):
    result = written(name)
    rows = result.get("real", result)["rows"]
    differences = {k: r["grad_max_diff"] for k, r in rows.items()}
    assert {name.split()[0] for name in differences} == {"zbpipe", "torch"}
    assert max(differences.values()) < 1e-5  # fp32 noise: 3e-7 was seen


def test_sleeps_take_no_less_than_simulated(written):
    for name, row in written("runtime_vs_torch")["virtual"].items():
        assert row["sync"]["ratio"] > 1, name
