"""The package as an installed one: everything is in it, kernels too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

LOOK = """
import zbpipe, zbpipe._native, zbpipe.kernels, zbpipe.demo.runner, zbpipe.report, sys
for module in (zbpipe, zbpipe._native, zbpipe.kernels):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
from importlib.resources import files
from zbpipe.kernels.recorded import recorded
assert (files("zbpipe") / "py.typed").is_file()
assert (files("zbpipe") / "_native.pyi").is_file()
assert (files("zbpipe.kernels") / "COMPILED.md").is_file() and recorded()
"""


def test_installed_away_from_the_sources(tmp_path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(tmp_path), str(ROOT)], check=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", LOOK, str(tmp_path)]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)


def test_editable() -> None:
    code = "import zbpipe.kernels as k; print(k.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_file()


def test_a_checkout_on_the_path() -> None:
    """Without any site-packages, so that no editable install helps; planning needs none of them."""
    code = "import zbpipe.kernels; print(zbpipe.kernels.__file__)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"


def test_a_source_distribution_can_be_built(tmp_path) -> None:
    """It holds every source of the extension, headers too, and what the kernels read."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    listed = set((tmp_path / "zbpipe.egg-info" / "SOURCES.txt").read_text().splitlines())
    wanted = {p for end in ("hpp", "cpp") for p in (ROOT / "csrc").rglob(f"*.{end}")}
    wanted |= {*(ROOT / "kernels").glob("*.py"), ROOT / "kernels" / "COMPILED.md"}
    assert len(wanted) > 20
    assert {str(p.relative_to(ROOT)) for p in wanted} <= listed
