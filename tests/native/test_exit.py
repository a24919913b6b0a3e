"""However a process leaves, it ends: no thread, process, descriptor or shared memory stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leaving import SCENARIOS

SCRIPT = Path(__file__).parents[1] / "leaving.py"


def session_of(pid: str) -> int:
    try:
        return int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[3])
    except OSError:  # it ended while we looked
        return -1


@pytest.fixture(scope="module")
def left():
    """What each scenario of leaving.py came to, all at once; and what is left of them."""
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *SCENARIOS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        processes = [p for p in os.listdir("/proc") if p.isdigit()]
        alive = [p for p in processes if session_of(p) == process.pid]
    shared = [
        name
        for name in set(os.listdir("/dev/shm")) - before
        if "zbpipe" in name or str(process.pid) in name
    ]
    return json.loads(out.splitlines()[-1]), alive, shared


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_process_ends_in_order(left, name):
    code, errors = left[0][name]
    assert (code, errors) == (0, "")


def test_no_process_and_no_shared_memory_is_left(left):
    assert left[1:] == ([], [])
