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

NEED_A_DEVICE = {"tests", "overhead", "flags", "copy", "step"}


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


@pytest.mark.parametrize("part", ["build", "tests", "overhead", "flags", "copy", "step", "doctor"])
def test_every_part_is_documented(part):
    text = (ROOT / "bench" / "gpu_check.py").read_text()
    assert f"\n{part}  " in text.split('"""')[1]
