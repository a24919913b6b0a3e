"""bench/gpu_check.py without a GPU says so part by part; on the fake device its parts do run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cuda"))

import faking  # noqa: E402 - the fake device's builder lives beside its tests

NEED_A_DEVICE = {"tests", "overhead", "flags", "transport", "copy", "step", "kernels"}


def check(out: Path, runtime: str, *parts: str) -> tuple[int, dict[str, dict[str, object]]]:
    """(exit status, results by part), with a runtime as CUDA's."""
    command = [sys.executable, ROOT / "bench" / "gpu_check.py", "--json", out]
    only = ["--only", *parts] if parts else []
    settings = os.environ | {"ZBPIPE_CUDART": runtime}
    done = subprocess.run([*command, *only], env=settings, capture_output=True, text=True)
    return done.returncode, json.loads(out.read_text())


def test_without_a_device_every_part_says_so_and_nothing_has_failed(tmp_path):
    parts = ("doctor", *NEED_A_DEVICE)
    status, results = check(tmp_path / "out.json", "/nowhere/libcudart.so", *parts)
    assert status == 0
    assert results["doctor"]["status"] == "ok"
    for name in NEED_A_DEVICE:
        assert results[name]["status"] == "no device"
        assert "/nowhere" in str(results[name]["detail"])


def test_a_part_that_fails_keeps_no_other_from_running(tmp_path):
    # The fake is no device for torch: what computes on it cannot run.
    fake = str(faking.compile_fake(tmp_path))
    status, results = check(tmp_path / "out.json", fake, "copy", "overhead", "flags")
    assert status == 1
    assert results["copy"]["status"] == "failed"
    assert results["overhead"]["gpu"]["native_us"] > 0
    assert math.isfinite(results["flags"]["hop_4b_us"])


@pytest.mark.slow
def test_transports_are_measured_between_processes_on_a_device(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setenv("ZBPIPE_CUDART", str(faking.compile_fake(tmp_path)))
    monkeypatch.setenv("ZBPIPE_FAKE_CUDA", str(tmp_path / "state"))
    import gpu_check

    found = gpu_check.transport(1)
    assert len(found) == 15 and min(found.values()) > 0
    assert {name.split("_")[0] for name in found} >= {"tcp", "torch"}


def test_what_computes_runs_on_the_cpu_too(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu_check

    step = gpu_check.step("cpu", quick=True)
    assert set(step) == {"plain_s", "zbpipe_s", "torch_1f1b_s"} and min(step.values()) > 0
    kernels = gpu_check.kernels("cpu", 32, 16)
    assert kernels["runs"] == {"dgrad": "torch on cpu", "wgrad": "torch on cpu"}
    assert kernels["wgrad_vs_cublas"] > 0 and kernels["grouped_vs_cublas"] > 0


@pytest.mark.parametrize("part", sorted(NEED_A_DEVICE | {"build", "doctor"}))
def test_every_part_is_documented(part):
    text = (ROOT / "bench" / "gpu_check.py").read_text()
    assert f"\n{part}  " in text.split('"""')[1]
