"""Sides that take turns on spawned ranks: blocks of steps without a barrier, in rotating order.

Ratios are medians over the rounds of ratios within a round, so that a slow minute of the machine
meets both sides.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpipe.runtime.world import spawn

WARM_UP = 2  # steps of each side before the first round: shapes, slots, allocators

Row = dict[str, Any]


@dataclass
class Side:
    """One schedule of one runtime on this rank."""

    step: Callable[[], None]  # zero_grad, forward and backward of one global batch
    grads: Callable[[], dict[str, Tensor]]  # of the own stages, under the model's names
    close: Callable[[], None] = lambda: None
    settle: Callable[[], None] = lambda: None  # until the device is through with the steps


def take_turns(
    sides: Mapping[str, Side], expected: Mapping[str, Tensor], steps: int, rounds: int
) -> dict[str, Row]:
    """Each side's blocks, and its gradients' largest difference to `expected` over all ranks."""
    names = list(sides)
    rows: dict[str, Row] = {name: {"step_s": [], "cpu_s": [], "faults": []} for name in names}
    for name, side in sides.items():
        for _ in range(WARM_UP):
            side.step()
        difference = largest_difference(side.grads(), expected)
        rows[name]["grad_max_diff"] = max(_everyone(difference))
    for index in range(rounds):
        first = index * len(names) // rounds
        for name in names[first:] + names[:first]:
            for key, value in _block(sides[name], steps).items():
                rows[name][key].append(value)
    for side in sides.values():
        side.close()
    return rows


def _block(side: Side, steps: int) -> Row:
    """Per step: seconds from the common start to the last end; CPU seconds and faults of a rank."""
    dist.barrier()
    start, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(steps):
        side.step()
    side.settle()
    end, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    faults = after.ru_minflt - used.ru_minflt
    starts, ends, cpus, all_faults = zip(*_everyone((start, end, cpu, faults)), strict=True)
    return {
        "step_s": (max(ends) - min(starts)) / steps,
        "cpu_s": sum(cpus) / steps,
        "faults": sum(all_faults) / steps,
    }


def _everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of gradients to those of the unsplit model, relative to each tensor's maximum."""
    return max(
        float((grad - expected[name]).abs().max() / expected[name].abs().max())
        for name, grad in found.items()
    )


def run(fn: Callable[..., None], ranks: int, *args: Any) -> Any:
    """`fn(rank, *args, out)` in spawned processes; what rank 0 wrote to `out`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rows.json"
        context = spawn(fn, ranks, (*args, str(out)))
        while not context.join():
            pass
        return json.loads(out.read_text())


def ratio(ours: Row, theirs: Row) -> float:
    """The median of the rounds' own ratios."""
    pairs = zip(ours["step_s"], theirs["step_s"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def fastest(rows: Mapping[str, Row], names: Iterable[str]) -> str:
    """The side with the least median step."""
    return min(names, key=lambda name: statistics.median(rows[name]["step_s"]))


def show(rows: Mapping[str, Row], base: str) -> None:
    """A table of all sides, each over `base`."""
    print(f"{'':22}{'s/step':>8}{'least':>8}{'most':>8}{f'÷ {base}':>14}", end="")
    print(f"{'cpu s':>8}{'faults':>8}{'grad diff':>11}")
    for name, row in rows.items():
        times = row["step_s"]
        print(f"{name:22}{statistics.median(times):8.4f}{min(times):8.4f}{max(times):8.4f}", end="")
        print(f"{ratio(row, rows[base]):14.3f}{statistics.median(row['cpu_s']):8.3f}", end="")
        print(f"{statistics.median(row['faults']):8.0f}{row['grad_max_diff']:11.1e}")


def show_bars(result: Mapping[str, Any], bars: Mapping[str, float]) -> None:
    print()
    for key, bar in bars.items():
        missed = "" if result[key] <= bar else "  MISSED"
        print(f"{key:30}{result[key]:8.3f}   bar {bar}{missed}")


def machine() -> Row:
    """What the numbers were measured on, and how busy it was when they began."""
    return {
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Some of torch's schedules print and warn while they are made."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
