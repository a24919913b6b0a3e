"""The command line, one file a sub-command; it starts without importing torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import ZbpipeError
from . import demo, doctor, schedule

COMMANDS = (demo, schedule, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `zbpipe ARGS`; returns the exit status: 0, 1 where something failed, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="zbpipe", description="Zero-bubble pipeline-parallel training for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"zbpipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except ZbpipeError as error:
        print(f"zbpipe {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"zbpipe {args.command}: interrupted", file=sys.stderr)
        return 130
    return status
