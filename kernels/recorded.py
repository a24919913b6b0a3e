"""What COMPILED.md says, for those who cannot compile: registers and shared memory."""

from __future__ import annotations

import re
from pathlib import Path

TABLE = Path(__file__).with_name("COMPILED.md")


def recorded() -> dict[str, dict[str, tuple[int, int]]]:
    """Triton version → case ("dgrad sm_90a bf16") → (registers a thread, shared bytes a block)."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    version = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## Triton "):
            version = line.removeprefix("## Triton ").strip()
            found[version] = {}
        elif version and re.match(r"\| [a-z_]+ sm_", line):
            name, registers, shared = (cell.strip() for cell in line.strip("| ").split("|"))
            found[version][name] = int(registers), int(shared)
    return found
