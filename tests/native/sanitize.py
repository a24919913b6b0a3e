"""Run the native executor without Python under AddressSanitizer, UBSan and ThreadSanitizer.

    python tests/native/sanitize.py [--only NAME] [--folder DIR]

Builds tests/native/driver.cpp with csrc/ and the fake CUDA device once for each sanitizer and runs
it over several Programs: on the CPU and on the fake device over each kind of link, ranks in one
process and in forked ones, to the end and with an action that raises.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from zbpipe.program import Programs, compile
from zbpipe.schedule import build

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for path in sorted((ROOT / "csrc").rglob("*.cpp"))
    if path.name != "python.cpp" and "schedule" not in path.parts
]
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread"]
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
CASES = [("zb_h1", 3, 6), ("zb_v", 2, 5)]
RUNS = 4


def build_driver(folder: Path, flags: list[str]) -> tuple[Path, Path]:
    """Compile the driver and the fake device; raises CalledProcessError where that fails."""
    driver, fake = folder / "driver", folder / "libfakecudart.so"
    compiler = os.environ.get("CXX", "c++")
    include = f"-I{ROOT / 'csrc'}"
    own = str(ROOT / "tests/native/driver.cpp")
    subprocess.run(
        [compiler, *FLAGS, *flags, include, own, *map(str, SOURCES), "-o", str(driver), "-ldl"],
        check=True,
    )
    sources = map(str, sorted((ROOT / "tests/cuda/fake").glob("*.cpp")))
    subprocess.run(
        [compiler, *FLAGS, *flags, "-fPIC", "-shared", *sources, "-o", str(fake)], check=True
    )
    return driver, fake


def text_of(programs: Programs) -> str:
    """Programs as the driver reads them: numbers and letters with blanks in between."""
    words: list[object] = [len(programs.ranks), len(programs.slots)]
    for (source, target), count in programs.slots.items():
        words += [source, target, count]
    for program in programs.ranks:
        words += [len(program.lanes), len(program.instructions)]
        for i in program.instructions:
            words += [i.lane, int(i.op), i.channel, i.slot]
            words += [i.action.stage, i.action.kind, i.action.microbatch, int(i.signals)]
            words += [len(i.waits), *i.waits]
        words += [len(program.destinations), *program.destinations]
        words += [len(program.sources), *program.sources]
        for pairs in (program.sends, program.needs):
            flat = [number for pair in pairs.items() for number in pair]
            words += [len(flat), *flat]
    return " ".join(map(str, words)) + "\n"


def run(driver: Path, fake: Path, folder: Path) -> list[str]:
    """Every case in every way; the commands that failed."""
    failed = []
    for number, (name, ranks, microbatches) in enumerate(CASES):
        programs = folder / f"{name}.txt"
        programs.write_text(text_of(compile(build(name, ranks, microbatches))))
        for device in ("cpu", "cuda", "nccl", "staged"):
            for where in ("local", "forked"):
                state = folder / f"state-{number}-{device}-{where}"
                settings = {
                    "ZBPIPE_CUDART": str(fake),
                    "ZBPIPE_FAKE_CUDA": str(state),
                    "ZBPIPE_NCCL": str(fake),
                    # Transfers by NCCL must not share a hardware queue.
                    "CUDA_DEVICE_MAX_CONNECTIONS": "32" if device == "nccl" else "2",
                    # The fake keeps streams and queues for as long as it lives.
                    "ASAN_OPTIONS": f"detect_leaks={int(device == 'cpu')}",
                    "TSAN_OPTIONS": "halt_on_error=1",
                }
                for fail in ([], ["fail"]):
                    state.unlink(missing_ok=True)
                    command = [str(driver), device, where, str(programs), str(RUNS), *fail]
                    done = subprocess.run(command, env=os.environ | settings)
                    what = " ".join([name, device, where, *fail])
                    print(f"{'ok' if done.returncode == 0 else 'FAILED':<8}{what}")
                    if done.returncode != 0:
                        failed.append(" ".join(command))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SANITIZERS, help="one sanitizer, or a plain build")
    parser.add_argument("--folder", type=Path, help="where to build (default: a temporary one)")
    options = parser.parse_args()
    names = [options.only] if options.only else [name for name in SANITIZERS if name != "plain"]
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            print(f"{name}: building")
            failed += run(*build_driver(folder, SANITIZERS[name]), folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
