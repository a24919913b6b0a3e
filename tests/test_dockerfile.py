"""The Dockerfile does what README tells a reader to do, and nothing else."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def commands_of_readme() -> list[list[str]]:
    section = (ROOT / "README.md").read_text().split("## Build it from source")[1].split("\n## ")[0]
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    lines = "".join(blocks).replace("&&", "\n").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_its_steps_are_those_of_the_readme() -> None:
    arguments = dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG")
    (torch,) = shlex.split(arguments["TORCH"])
    steps = []
    for name, rest in instructions():
        if name == "RUN":
            for part in rest.replace("${TORCH}", torch).split("&&"):
                steps.append([word for word in shlex.split(part) if word[:5] != "--no-"])
    steps.remove(["rm", "-rf", "/var/lib/apt/lists/*"])
    *wanted, doctor = [words for words in commands_of_readme() if words[0] != "docker"]
    assert steps == wanted
    (command,) = [rest for name, rest in instructions() if name == "CMD"]
    assert re.findall(r'"(.*?)"', command) == ["zbpipe", *doctor[1:]]


def test_the_build_arguments_of_the_readme_are_there() -> None:
    names = {rest.split("=")[0] for name, rest in instructions() if name == "ARG"}
    builds = [c for c in commands_of_readme() if c[:2] == ["docker", "build"]]
    given = {w.split("=")[0] for c in builds for w in c if "=" in w}
    assert len(builds) == 2
    assert given == names == {"BASE", "TORCH"}


def test_what_the_host_built_stays_out() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "build", "**/*.so"} <= {*ignored}
