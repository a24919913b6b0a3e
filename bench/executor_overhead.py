"""What an instruction costs the executor: microseconds each, by the wall clock of whole runs.

    python bench/executor_overhead.py [--json FILE] [--repeats 7]

native    one rank, 10,000 sleeps of 0
callback  one rank, 10,000 empty Python callbacks

Every figure is a median over runs, with the least and the most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from figures import report

from zbpipe.program import compile, virtual
from zbpipe.runtime.executor import Crew, Loaded
from zbpipe.runtime.world import World
from zbpipe.schedule import build

INSTRUCTIONS = 10_000

# What zbpipe holds itself to on two ordinary cores.
BARS = {"native_us": ("at most", 5.0), "callback_us": ("at most", 10.0)}


def overhead(repeats: int, devices: dict[int, int] | None = None) -> dict[str, list[float]]:
    """Microseconds an instruction of each run; `devices` as of Crew, None for the CPU."""
    programs = compile(build("gpipe", 1, INSTRUCTIONS // 2))
    crew = Crew(World(1, (0,)), timeout=60.0, devices=devices)
    crew.connect(programs.slots)
    sleeps = crew.load(virtual(programs, lambda _: 0.0, lambda _: 0))
    callbacks = crew.load(programs)
    cases: list[tuple[str, Loaded, Callable[[int], None] | None]] = [
        ("native_us", sleeps, None),
        ("callback_us", callbacks, lambda index: None),
    ]
    out: dict[str, list[float]] = {}
    for name, loaded, callback in cases:
        for repeat in range(repeats + 1):
            start = time.perf_counter()
            crew.run(loaded, {0: callback})
            if repeat:
                took = (time.perf_counter() - start) / INSTRUCTIONS
                out.setdefault(name, []).append(took * 1e6)
    crew.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write medians and spreads here")
    parser.add_argument("--repeats", type=int, default=7, help="runs a figure (default 7)")
    options = parser.parse_args()
    report(overhead(options.repeats), BARS, options.json)


if __name__ == "__main__":
    main()
