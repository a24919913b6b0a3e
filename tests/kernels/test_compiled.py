"""Every kernel compiled ahead of time for every target and dtype, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `python -m zbpipe.kernels.compiled --json` writes, with an empty cache."""
    pytest.importorskip("triton", reason="triton is not installed (extra [cuda])")
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "-m", "zbpipe.kernels.compiled", "--json", str(folder / "out.json")]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (folder / "out.json").exists(), done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


def test_nothing_is_spilled_and_tensor_cores_are_used(found) -> None:
    wrong = {name: case["complaints"] for name, case in found["cases"].items()}
    assert not {name: c for name, c in wrong.items() if c}


def test_every_kernel_is_there_for_every_target_and_dtype(found) -> None:
    kernels = ("dgrad", "wgrad", "bias_grad", "parts_sum", "norm_dgrad", "norm_wgrad")
    kernels += ("embedding_grad", "expert_wgrad", "dgrad_ragged", "dgrad_turned")
    kernels += ("wgrad_ragged", "expert_wgrad_ragged")
    targets = ("sm_80", "sm_90a", "sm_100a")
    dtypes = ("bf16", "fp16", "fp32")
    wanted = {f"{k} {t} {d}" for k in kernels for t in targets for d in dtypes}
    wanted |= {
        f"{k}_tma {t} {d}" for k in kernels[:2] for t in targets[1:] for d in dtypes if d != "fp32"
    }
    # Of several microbatches, which fp32 operands never are in one launch.
    wanted |= {
        f"wgrad_grouped{r} {t} {d}" for r in ("", "_ragged") for t in targets for d in dtypes[:2]
    }
    wanted |= {f"wgrad_tma_grouped {t} {d}" for t in targets[1:] for d in dtypes[:2]}
    assert set(found["cases"]) == wanted


def test_registers_are_as_recorded(found) -> None:
    recorded = found["recorded"].get(found["triton"])
    if recorded is None:
        pytest.skip(f"COMPILED.md has nothing of Triton {found['triton']}; run compiled --write")
    assert set(recorded) == set(found["cases"])
    for name, case in found["cases"].items():
        assert abs(case["registers"] - recorded[name]) <= 0.1 * recorded[name], name
