"""`zbpipe demo`: train a small GPT on real text under several schedules, and compare them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..schedule import families

DEFAULT_SCHEDULES = "1f1b,zb1p,zb2p"


def add(commands: Any) -> None:
    """Add the sub-command to argparse's `commands`."""
    parser = commands.add_parser(
        "demo",
        help="train a byte-level GPT over several ranks on this machine, under several schedules",
        description="Trains a byte-level GPT on the Python standard library's sources over ranks "
        "that it spawns, once for each schedule, and writes a report. With --device virtual the "
        "same Programs run with sleeps in place of a model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cores = os.cpu_count() or 2
    parser.add_argument(
        "--stages", type=int, default=max(2, min(4, cores)), help="pipeline ranks (processes)"
    )
    parser.add_argument("--microbatches", type=int, default=8, help="slices of a global batch")
    parser.add_argument(
        "--schedule", default=DEFAULT_SCHEDULES, help="names, with commas in between"
    )
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps for each schedule")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")
    parser.add_argument("--device", choices=("cpu", "virtual"), default="cpu")
    parser.add_argument(
        "--times",
        default="10,10,10",
        help="with --device virtual: milliseconds of F, I and W of a stage",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument(
        "--report", type=Path, default=Path("zbpipe-report.html"), help="where the report goes"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 0. Raises ConfigError on options that cannot be right."""
    names = _names(args.schedule)
    for option in ("stages", "microbatches", "steps"):
        if getattr(args, option) < 1:
            raise ConfigError(f"--{option} {getattr(args, option)}: want at least 1")
    if args.steps < 2:
        raise ConfigError(f"--steps {args.steps}: want at least 2, the first warms up")
    for option in ("json", "report"):
        path = getattr(args, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{option} {path}: there is no folder {path.absolute().parent}")
    times = _times(args.times)

    # Only now: `zbpipe --help` does without torch.
    from ..demo import runner, table

    options = runner.Options(
        stages=args.stages,
        microbatches=args.microbatches,
        schedules=names,
        steps=args.steps,
        seed=args.seed,
        device=args.device,
        times=times,
    )
    results = runner.run(options)
    table.show(results)
    args.report.write_text(table.report(results))
    if args.json is not None:
        args.json.write_text(json.dumps(table.to_json(results), indent=2) + "\n")
        print(f"table: {args.json.absolute()}")
    print(f"report: {args.report.absolute()}")
    return 0


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    if not names:
        raise ConfigError(f"--schedule {text!r}: want names with commas, as {DEFAULT_SCHEDULES}")
    for name in names:
        families.resolve(name)
    return names


def _times(text: str) -> tuple[float, float, float]:
    try:
        forward, input_grad, weight_grad = (float(part) / 1e3 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--times {text!r}: want three numbers, as 10,10,10") from None
    if min(forward, input_grad, weight_grad) < 0 or max(forward, input_grad, weight_grad) > 60:
        raise ConfigError(f"--times {text!r}: want milliseconds from 0 to 60000")
    return forward, input_grad, weight_grad
