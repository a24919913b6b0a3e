"""Runs cases_*.py in processes of their own: TRITON_INTERPRET counts at Triton's import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = sorted(Path(__file__).parent.glob("cases_*.py"))


# A GPU has every variant compiled first, some 0.3 s each: more than pytest's limit a test is fair.
ON_GPU = pytest.param("GPU", marks=[pytest.mark.gpu, pytest.mark.timeout(900)])


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
@pytest.mark.parametrize("where", ["interpreter", ON_GPU])
def test_every_kernel(where, cases) -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra [cuda])")
    if where == "GPU" and not torch.cuda.is_available():
        pytest.skip("torch.cuda finds no GPU")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if where == "interpreter" else {})
    command = [sys.executable, "-m", "pytest", str(cases), "-q", "--tb=short"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
