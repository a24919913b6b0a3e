"""The executor without Python (driver.cpp), plain; `make sanitize` runs it under the sanitizers."""

from __future__ import annotations

import subprocess

import pytest
import sanitize

from zbpipe.program import compile
from zbpipe.schedule import build


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    return *sanitize.build_driver(folder, []), folder


def test_every_case_runs_on_the_cpu_and_on_the_fake_device(driver):
    assert sanitize.run(*driver) == []


@pytest.mark.slow
def test_the_driver_sees_messages_that_are_mixed_up(driver, tmp_path):
    words = sanitize.text_of(compile(build("gpipe", 2, 3))).split()
    # The slot of rank 0's first send: 0 → 1 F0 goes where F1 should.
    at = words.index("2", 8)
    while words[at + 2] != "0" or words[at + 1] != "0":
        at = words.index("2", at + 1)
    words[at + 2] = "1"
    path = tmp_path / "mixed.txt"
    path.write_text(" ".join(words))
    command = [str(driver[0]), "cpu", "local", str(path), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "failed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["address", "thread"])
def test_the_sanitizers_find_nothing(name, tmp_path):
    flags = sanitize.SANITIZERS[name]
    assert sanitize.run(*sanitize.build_driver(tmp_path, flags), tmp_path) == []
