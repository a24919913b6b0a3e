"""Numbers as they are typed: lists of them, and memory in bytes, in act, or in p times act."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..errors import ConfigError

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)


def numbers(option: str, text: str, counts: Sequence[int]) -> list[float]:
    """The numbers of `text`, with commas in between; as many as one of `counts`.

    Raises ConfigError naming the entry that is not a finite number ≥ 0, or the wrong length.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in counts:
        wanted = " or ".join(map(str, dict.fromkeys(counts)))
        raise ConfigError(f"{option} {text!r} has {len(parts)} entries: want {wanted}")
    return [_number(option, text, index, part) for index, part in enumerate(parts)]


def _number(option: str, text: str, index: int, part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{option} {text!r}, entry {index} = {part!r}: want a finite number ≥ 0")
    return value


def memory(text: str, acts: Sequence[float]) -> list[float]:
    """Bytes a rank from `1.5p`, `12` (act of a full stage) or `60GiB`; one for all, or one a rank.

    `acts`: the act of each rank's full stage, in bytes. Raises ConfigError naming the entry that
    is none of these.
    """
    parts = [part.strip() for part in text.split(",")]
    ranks = len(acts)
    if len(parts) not in (1, ranks):
        raise ConfigError(f"--memory {text!r} has {len(parts)} entries: want 1 or {ranks}")
    if len(parts) == 1:
        parts *= ranks
    return [_memory(text, index, part, act, ranks) for index, (part, act) in _pairs(parts, acts)]


def _pairs(parts: Sequence[str], acts: Sequence[float]) -> list[tuple[int, tuple[str, float]]]:
    return list(enumerate(zip(parts, acts, strict=True)))


def _memory(text: str, index: int, part: str, act: float, ranks: int) -> float:
    unit = act
    if match := _BYTES.fullmatch(part):
        base = 1024 if match[3] else 1000
        part, unit = match[1], float(base ** _UNITS[match[2].lower()])
    elif part[-1:].lower() == "p":
        part, unit = part[:-1], act * ranks
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"--memory {text!r}, entry {index}: want 1.5p, a number of act, or bytes as 60GiB"
        )
    return value * unit


def size(option: str, text: str) -> float:
    """A number, or bytes with a unit. Raises ConfigError on what is neither."""
    if match := _BYTES.fullmatch(text.strip()):
        base = 1024 if match[3] else 1000
        return float(match[1]) * float(base ** _UNITS[match[2].lower()])
    return numbers(option, text, (1,))[0]
