"""Is zbpipe's step faster than torch.distributed.pipelining's, and how near is it to its plan?

real: a GPT on spawned CPU ranks, one thread each, the same stages under every schedule of both
runtimes. A block is a number of steps without a barrier, from the ranks' common start to the last
one's end. Each round runs a block of every side, in an order that rotates from round to round;
ratios are medians over the rounds of ratios within a round.

virtual: sleeps of F = I = W through the executor and shared memory, measured ÷ simulated.

transport: the figures of bench/transport.py, which see.

Both runtimes share their processes, so torch's side too gains by what zbpipe does to them: malloc
that keeps freed memory (zbpipe/runtime/memory.py).

    python bench/runtime_vs_torch.py --json vs_torch.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import transport
from figures import write_json
from pairs import Row, fastest, machine, ratio, run, show, show_bars, take_turns
from sides import (
    TORCH,
    TORCH_1F1B,
    ZBPIPE,
    Work,
    torch_side,
    unsplit,
    zbpipe_side,
)
from virtual_device import Sleeps, measure, worst

from zbpipe.demo.gpt import GPTConfig

BARS = {
    "ratio_vs_torch_1f1b": 0.92,
    "ratio_vs_torch_best": 1.02,
    "virtual_over_simulated": 1.04,
    "virtual_1mib_over_simulated": 1.06,
}


def real(rank: int, work: Work, steps: int, rounds: int, out: str) -> None:
    """One rank of the comparison; rank 0 writes what all measured to `out`."""
    ours, theirs = work.model(), work.model()
    sides = {n: zbpipe_side(n, work, ours)[0] for n in ZBPIPE}
    sides |= {n: torch_side(n, work, theirs, rank) for n in TORCH}
    rows = take_turns(sides, unsplit(work), steps, rounds)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))


def sleeping(rank: int, sleeps: Sleeps, out: str) -> None:
    """One rank of the virtual device; rank 0 writes what all measured to `out`."""
    found = measure(rank, sleeps)
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def compare(rows: dict[str, Row]) -> Row:
    """The two ratios: the fastest by its median, then the median of the rounds' own ratios."""
    best, best_torch = fastest(rows, ZBPIPE), fastest(rows, TORCH)
    return {
        "ratio_vs_torch_1f1b": ratio(rows[best], rows[TORCH_1F1B]),
        "ratio_vs_torch_best": ratio(rows[best], rows[best_torch]),
        "best": best,
        "torch_best": best_torch,
    }


def show_virtual(rows: dict[str, Row]) -> None:
    print(f"\n{'virtual device':22}{'sync ms':>9}{'ideal':>8}{'ratio':>8}", end="")
    print(f"{'stage ms':>10}{'ideal':>8}{'ratio':>8}")
    for name, row in rows.items():
        print(f"{name:22}", end="")
        for width, objective in ((9, "sync"), (10, "stage")):
            one = row[objective]
            print(f"{1e3 * one['measured_s']:{width}.1f}{1e3 * one['simulated_s']:8.1f}", end="")
            print(f"{one['ratio']:8.3f}", end="")
        print()


def show_transport(rows: dict[str, list[float]]) -> None:
    print(f"\n{'transport':22}{'median':>10}{'least':>10}{'most':>10}")
    for name, values in rows.items():
        print(f"{name:22}{statistics.median(values):10.2f}{min(values):10.2f}{max(values):10.2f}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="of the real part")
    parser.add_argument("--steps", type=int, default=10, help="of a block, without a barrier")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each side")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--quick", action="store_true", help="a tiny run; its numbers mean nothing")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    config, samples, m, steps, rounds = GPTConfig(layers=8), 2, 8, args.steps, args.rounds
    sleeps, repeats = Sleeps(ranks=8, microbatches=16, seconds=0.010, steps=6), 5
    if args.quick:
        config, samples, m, steps, rounds = GPTConfig(256, 16, 4, 2, 8), 1, 4, 1, 1
        sleeps, repeats = Sleeps(ranks=2, microbatches=3, seconds=0.002, steps=2), 1
    about = machine()
    rows = run(real, args.ranks, Work(config, m, samples, args.ranks), steps, rounds)
    found = compare(rows)
    show(rows, TORCH_1F1B)
    print(f"best: {found['best']} against {found['torch_best']}")
    virtual = run(sleeping, sleeps.ranks, sleeps)
    show_virtual(virtual)
    carried = transport.samples(repeats)
    show_transport(carried)
    result = {
        "ratio_vs_torch_1f1b": found["ratio_vs_torch_1f1b"],
        "ratio_vs_torch_best": found["ratio_vs_torch_best"],
        "virtual_over_simulated": worst(virtual, with_bytes=False),
        "virtual_1mib_over_simulated": worst(virtual, with_bytes=True),
    }
    show_bars(result, BARS)
    result |= {"real": {**found, "rows": rows}, "virtual": virtual, "transport": carried}
    result["machine"] = {**about, "load_after": os.getloadavg()[0]}
    write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
