"""What benches share that measure figures by name: a table beside the bars, and the JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# "at most" or "at least", and the number.
Bars = Mapping[str, tuple[str, float]]


def report(samples: Mapping[str, Sequence[float]], bars: Bars, path: Path | None) -> None:
    """Print median, least and most of each figure, and write medians and spreads to `path`."""
    medians = {name: statistics.median(values) for name, values in samples.items()}
    print(f"{'figure':<22}{'median':>10}{'least':>10}{'most':>10}   bar")
    for name, values in samples.items():
        bar = " ".join(map(str, bars.get(name, ())))
        print(f"{name:<22}{medians[name]:>10.2f}{min(values):>10.2f}{max(values):>10.2f}   {bar}")
    spread = {name: [min(values), max(values)] for name, values in samples.items()}
    write_json(path, medians | {"spread": spread})


def write_json(path: Path | None, data: Any) -> None:
    """Write `data`, where there is a path, making the folder if need be."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2) + "\n")
