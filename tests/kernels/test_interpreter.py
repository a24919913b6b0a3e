"""Runs in_interpreter.py in a process of its own: TRITON_INTERPRET counts at Triton's import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PART = Path(__file__).with_name("in_interpreter.py")


def test_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra [cuda])")
    command = [sys.executable, "-m", "pytest", str(PART), "-q", "--tb=short"]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
