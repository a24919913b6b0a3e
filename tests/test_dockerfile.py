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
    lines = "".join(blocks).splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_its_steps_are_those_of_the_readme() -> None:
    given = {name: rest for name, rest in instructions() if name == "ARG"}
    arguments = dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG" and given)
    torch = shlex.split(arguments["TORCH"])[0]
    steps = []
    for name, rest in instructions():
        if name == "RUN":
            steps += [shlex.split(part) for part in rest.split("&&")]
    wanted = commands_of_readme()
    (apt,) = [c for c in wanted if c[:2] == ["apt-get", "install"]]
    (make,) = [c for c in wanted if c[0] == "make"]
    installs = [s for s in steps if s[:2] == ["apt-get", "install"]]
    assert [{w for w in s if w != "--no-install-recommends"} for s in installs] == [{*apt}]
    assert [[w.replace("${TORCH}", torch) for w in s] for s in steps if s[0] == "make"] == [make]
    tidies = (["apt-get", "update"], ["rm", "-rf", "/var/lib/apt/lists/*"])
    assert all(s in tidies or s[0] == "make" or s in installs for s in steps)
    (doctor,) = [c for c in wanted if c[0].endswith("zbpipe")]
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
