"""The fake beside a real CUDA runtime, which a torch built for CUDA loads for the whole process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

RUN = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from faking import Fake, cuda_crew, run_relays
from replaying import make
from zbpipe.program import compile
from zbpipe.runtime.world import World
fake = Fake(sys.argv[2])
fake.lib.fake_reset()
crew, loaded = cuda_crew(World(2, (0, 1)), compile(make("zb_h1", 2, 4)))
run_relays(fake, crew, loaded, range(2))
fake.settle([executor.stream(0) for executor in crew.executors.values()])
crew.close()
assert fake.reports() == []
"""


def names_of(library: Path) -> list[str]:
    """The functions of CUDA that a library exports."""
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r" T ((?:cuda|cu|nccl)[A-Z]\w*)", table)


def test_its_calls_are_its_own(fake_library, tmp_path) -> None:
    """Another library with the same names, found first, is never called."""
    names = names_of(fake_library)
    assert len(names) > 30
    source, decoy = tmp_path / "decoy.c", tmp_path / "libdecoy.so"
    source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names))
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(decoy)], check=True)
    paths = [str(TESTS), str(TESTS / "cuda"), *filter(None, sys.path)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "ZBPIPE_CUDART": str(fake_library),
        "ZBPIPE_FAKE_CUDA": str(tmp_path / "state"),
    }
    command = [sys.executable, "-c", RUN, str(decoy), str(fake_library)]
    subprocess.run(command, check=True, env=environment)
