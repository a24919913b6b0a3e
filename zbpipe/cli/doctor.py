"""`zbpipe doctor`: what works here, and how to mend what does not."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..doctor import Report, examine


def add(commands: Any) -> None:
    """Add the sub-command to argparse's `commands`."""
    parser = commands.add_parser(
        "doctor",
        help="say what works here, and how to mend what does not",
        description="Looks at the extension, torch, the CUDA runtime and driver, devices, peer "
        "access, NCCL, Triton and the transports. Status 0 where pipelines run on the CPU.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns 0 where the CPU path works, else 1."""
    report = examine()
    print(json.dumps(report.as_json(), indent=2) if args.json else text_of(report))
    return 0 if report.cpu else 1


def text_of(report: Report) -> str:
    """The findings as lines, each missing thing with its fix below it."""
    width = max(len(found.name) for found in report.findings)
    lines = []
    for found in report.findings:
        lines.append(f"{'ok' if found.ok else 'no':<4}{found.name:<{width}}  {found.detail}")
        if not found.ok:
            lines.append(f"{'':<{width + 6}}-> {found.fix}")
    say = {True: "the executor runs here", False: "the executor does not run here"}
    lines.append(f"CPU: {say[report.cpu]}. CUDA: {say[report.cuda]}.")
    return "\n".join(lines)
