"""Ranks that really have a network of their own each, joined by a cable that can be cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cases import WIDTH, mse, regression

WORKER = str(Path(__file__).parent / "host_worker.py")
_HANG_S = 100  # hang guard of what is waited for below
((X, Y),) = regression((8, WIDTH))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


class Cable:
    """Two network namespaces and a pair of interfaces between them."""

    def __init__(self) -> None:
        self.name = f"zb{os.getpid()}"
        self.spaces = [f"{self.name}-0", f"{self.name}-1"]

    def lay(self) -> str:
        """Why it cannot be done here; empty if it is."""
        if shutil.which("ip") is None or shutil.which("unshare") is None:
            return "needs ip and unshare"
        ends = [f"{self.name}v0", f"{self.name}v1"]
        commands = [["ip", "netns", "add", space] for space in self.spaces]
        commands.append(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]])
        for i, (space, end) in enumerate(zip(self.spaces, ends, strict=True)):
            commands.append(["ip", "link", "set", end, "netns", space, "name", "cable"])
            inside = ["ip", "-n", space]
            commands.append([*inside, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable"])
            commands += [[*inside, "link", "set", dev, "up"] for dev in ("lo", "cable")]
        commands.append(["unshare", "--pid", "--fork", "--mount-proc", "true"])
        for command in commands:
            done = _run(*command)
            if done.returncode != 0:
                return f"{' '.join(command)}: {done.stderr.strip()}"
        return ""

    def cut(self) -> None:
        assert _run("ip", "-n", self.spaces[0], "link", "set", "cable", "down").returncode == 0

    def remove(self) -> None:
        if shutil.which("ip") is None:
            return
        for space in self.spaces:
            _run("ip", "netns", "del", space)


@pytest.fixture
def cable() -> Iterator[Cable]:
    made = Cable()
    try:
        reason = made.lay()
        if reason:
            pytest.skip(f"network namespaces cannot be made here: {reason}")
        yield made
    finally:
        made.remove()


class Job:
    """Two ranks, one in each namespace; `apart`: with process numbers of their own as well."""

    def __init__(self, cable: Cable, folder: Path, how: str, apart: bool, hosts: str) -> None:
        self.outs = [folder / f"{rank}.json" for rank in (0, 1)]
        self.ranks = []
        for rank, space in enumerate(cable.spaces):
            inside = ["ip", "netns", "exec", space]
            if apart:
                inside += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            settings = {
                "GLOO_SOCKET_IFNAME": "cable",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            if hosts:
                settings["ZBPIPE_HOST"] = hosts[rank]
            command = [*inside, sys.executable, WORKER, how, str(rank), "2", "-"]
            errors = (folder / f"{rank}.err").open("wb")
            self.ranks.append(
                subprocess.Popen(
                    [*command, str(self.outs[rank])],
                    env=os.environ | settings,
                    stdout=errors,
                    stderr=errors,
                )
            )
            errors.close()

    def until(self, suffix: str) -> None:
        end = time.monotonic() + _HANG_S
        while not all(out.with_suffix(suffix).exists() for out in self.outs):
            assert time.monotonic() < end, self.errors()
            assert all(rank.poll() is None for rank in self.ranks), self.errors()
            time.sleep(0.01)

    def results(self) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.wait(_HANG_S)
        assert all(out.exists() for out in self.outs), self.errors()
        return [json.loads(out.read_text()) for out in self.outs]

    def errors(self) -> str:
        return "\n".join(out.with_suffix(".err").read_text() for out in self.outs)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("apart", "hosts", "transport"),
    [
        pytest.param(True, "", "tcp", id="pid-namespaces"),
        pytest.param(False, "ab", "tcp", id="named-hosts", marks=pytest.mark.slow),
        pytest.param(False, "", "shm", id="shared-memory"),
        pytest.param(True, "", "torch", id="torch"),
    ],
)
def test_two_networks_make_one_pipeline(cable, tmp_path, apart, hosts, transport) -> None:
    how = "trains_by_torch" if transport == "torch" else "trains"
    with Job(cable, tmp_path, how, apart, hosts) as job:
        results = job.results()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(4)))
    loss = mse(model(X), Y)
    loss.backward()
    grads: dict[str, Any] = {}
    for result in results:
        assert "losses" in result, (result, job.errors())
        assert result["losses"] == pytest.approx([loss.item()] * 3, rel=1e-12)
        assert f": {transport}\n" in result["summary"]
        grads |= result["grads"]
    for name, parameter in model.named_parameters():
        # Three steps' gradients are added up.
        got = torch.tensor(grads[name], dtype=torch.float64) / 3
        torch.testing.assert_close(got, parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("apart", "how"),
    [
        pytest.param(True, "until_cut", id="pid-namespaces"),
        pytest.param(False, "until_cut", id="named-hosts", marks=pytest.mark.slow),
        pytest.param(True, "until_cut_by_torch", id="torch"),
    ],
)
def test_a_cable_that_is_cut_in_a_step_is_an_error_on_both_ends(
    cable, tmp_path, apart, how
) -> None:
    with Job(cable, tmp_path, how, apart, "" if apart else "ab") as job:
        job.until(".ready")
        cable.cut()
        first, second = job.results()
    for result, other in ((first, 1), (second, 0)):
        assert result["error"] == "StageError", (result, job.errors())
        assert result["rank"] == other, result
        said = "nothing is heard of this rank", "the connection to it broke"
        assert any(words in result["message"] for words in said), result


def test_a_pipeline_is_closed_over_a_cable_that_is_cut(cable, tmp_path) -> None:
    with Job(cable, tmp_path, "cut_between_steps", True, "") as job:
        job.until(".ready")
        cable.cut()
        for out in job.outs:
            out.with_suffix(".cut").touch()
        assert job.results() == [{}, {}], job.errors()
