"""`zbpipe demo` and the example, run by their documented commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zbpipe.cli import main

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RESULT_KEYS = {
    "step_s",
    "bubble_planned",
    "bubble_measured",
    "memory_planned",
    "memory_measured",
    "loss_before",
    "loss_after",
    "grad_max_diff",
    "losses",
}


def demo(tmp_path: Path, *options: str) -> tuple[dict, str]:
    """(the table, what was printed) of a run that went well."""
    out = tmp_path / "table.json"
    report = tmp_path / "report.html"
    command = [sys.executable, "-m", "zbpipe", "demo", *options]
    command += ["--json", str(out), "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert str(report) in done.stdout
    assert report.read_text().startswith("<!DOCTYPE html>")
    return json.loads(out.read_text()), done.stdout


def test_the_demo_trains_under_every_schedule(tmp_path) -> None:
    table, printed = demo(tmp_path, "--stages", "2", "--steps", "4")
    assert (table["device"], table["stages"], table["microbatches"]) == ("cpu", 2, 8)
    assert list(table["schedules"]) == ["1f1b", "zb1p", "zb2p"]
    for name, row in table["schedules"].items():
        assert set(row) == RESULT_KEYS
        assert row["loss_after"] < row["loss_before"] - 0.5
        assert len(row["losses"]) == 4
        assert row["losses"] == table["schedules"]["1f1b"]["losses"], name
        assert row["grad_max_diff"] < 1e-5
        assert 0 < row["memory_measured"] <= row["memory_planned"]
        assert row["step_s"] > 0
        assert -0.01 < row["bubble_planned"] < 0.5
    # Planned from times that were measured on a machine that may be busy: far apart enough.
    assert (
        table["schedules"]["1f1b"]["bubble_planned"] > table["schedules"]["zb2p"]["bubble_planned"]
    )
    assert "bitwise" in printed


def test_the_virtual_device_shows_eight_stages(tmp_path) -> None:
    table, printed = demo(
        tmp_path, "--device", "virtual", "--stages", "8", "--microbatches", "16", "--steps", "3"
    )
    assert table["device"] == "virtual"
    assert "VIRTUAL" in printed
    assert "VIRTUAL" in (tmp_path / "report.html").read_text()
    planned = {name: row["bubble_planned"] for name, row in table["schedules"].items()}
    assert planned["1f1b"] == pytest.approx(7 / 23)
    assert planned["zb2p"] == pytest.approx(0)
    for row in table["schedules"].values():
        assert row["loss_before"] is None
        assert abs(row["bubble_measured"] - row["bubble_planned"]) < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "zbp1"], "zb1p"),
        (["--schedule", ","], "--schedule"),
        (["--stages", "0"], "--stages 0"),
        (["--stages", "11"], "10 layers"),
        (["--microbatches", "25"], "24 sequences"),
        (["--steps", "1"], "--steps 1"),
        (["--times", "1,2"], "--times"),
        (["--device", "virtual", "--times=-1,2,3"], "--times"),
        (["--json", "/nowhere/x.json"], "/nowhere"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_bad_options(options, message, capsys, tmp_path) -> None:
    assert main(["demo", "--report", str(tmp_path / "r.html"), *options]) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, zbpipe.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_under_torchrun(ranks, tmp_path) -> None:
    command = [BIN / "torchrun", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "examples/train_gpt.py", "--steps", "3"]
    command += ["--layers", "2", "--hidden", "64", "--save", str(tmp_path / "model")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.search(r"held-out loss (\S+) → (\S+)", done.stdout).groups())
    assert after < before
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == ranks
    assert done.stdout.count("step ") >= 3


def finetuned(*options: str) -> list[float]:
    """The losses of a run of the example on two ranks."""
    command = [BIN / "torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "examples/finetune_hf.py", "--steps", "5"]
    command += ["--text", "README.md", "--sequence", "32", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 5
    return losses


def test_finetuning_a_hugging_face_model_under_torchrun(tmp_path) -> None:
    losses = finetuned("--save", str(tmp_path / "model"))
    assert losses[-1] < losses[0] - 0.3
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2
    # What was saved is a folder to go on from, once it has a tokenizer: here one of bytes.
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    tokenizer.save_pretrained(tmp_path / "model")
    assert tokenizer("a")["input_ids"][0] == ord("a") + 3  # other bytes, so it starts over
    again = finetuned("--model", str(tmp_path / "model"), "--lr", "1e-4")
    assert again[-1] < again[0]
