"""Costs: what each stage's actions take in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import ConfigError
from .schedule.core import Action

SOURCES = ("unit", "given", "profiled")


@dataclass(frozen=True)
class Costs:
    """Per stage: times in seconds, memory in bytes of one microbatch.

    `forward`, `input_grad`, `weight_grad`: seconds of F, I and W; B takes I + W.
    `comm`: seconds over boundary s → s+1, one way, one entry a boundary (stages - 1); it counts
    only where the two stages live on different ranks.
    `act`: bytes held from F until I; `stash`: the part of it that stays until W.
    `transient`: bytes held only while an action runs (say, logits); default 0.
    `boundary`: bytes of the tensors that cross s → s+1; default 0.
    `source`: where the numbers are from, "unit", "given" or "profiled".

    Sequences are kept as tuples of float. Raises ConfigError naming the field and the index of an
    entry that is not a finite number ≥ 0, or the field whose length is wrong.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    comm: tuple[float, ...]
    act: tuple[float, ...]
    stash: tuple[float, ...]
    transient: tuple[float, ...] = ()
    boundary: tuple[float, ...] = ()
    source: str = "given"

    def __post_init__(self) -> None:
        if not hasattr(self.forward, "__len__") or not len(self.forward):
            raise ConfigError(f"forward = {self.forward!r}: want one number a stage")
        if self.source not in SOURCES:
            raise ConfigError(f"source = {self.source!r}: want one of {', '.join(SOURCES)}")
        stages = len(self.forward)
        for field in fields(self):
            if field.name != "source":
                numbers = _numbers(field.name, getattr(self, field.name), stages)
                object.__setattr__(self, field.name, numbers)

    @classmethod
    def uniform(
        cls,
        stages: int,
        f: float = 1.0,
        i: float = 1.0,
        w: float = 1.0,
        comm: float = 0.0,
        act: float = 1.0,
        stash: float = 1.0,
        source: str = "unit",
    ) -> Costs:
        """Every stage alike: `f`, `i`, `w`, `comm` in seconds, `act`, `stash` in bytes."""
        if stages < 1:
            raise ConfigError(f"stages = {stages}: want at least 1")
        return cls(
            forward=(f,) * stages,
            input_grad=(i,) * stages,
            weight_grad=(w,) * stages,
            comm=(comm,) * (stages - 1),
            act=(act,) * stages,
            stash=(stash,) * stages,
            source=source,
        )

    @property
    def stages(self) -> int:
        return len(self.forward)

    def duration(self, action: Action) -> float:
        """Seconds that `action` takes; B is I and W in one go."""
        stage, kind, _ = action
        if kind == "F":
            return self.forward[stage]
        if kind == "I":
            return self.input_grad[stage]
        if kind == "W":
            return self.weight_grad[stage]
        return self.input_grad[stage] + self.weight_grad[stage]

    def work(self, stage: int) -> float:
        """Seconds that one microbatch keeps `stage` busy: F + I + W."""
        return self.forward[stage] + self.input_grad[stage] + self.weight_grad[stage]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back to an equal Costs."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """Inverse of `to_dict`; raises ConfigError on a field that is unknown or missing."""
        known = {field.name for field in fields(cls)}
        optional = {"transient", "boundary", "source"}
        if wrong := sorted(set(data) - known):
            raise ConfigError(f"costs have no field {wrong[0]!r}: want {', '.join(sorted(known))}")
        if missing := sorted(known - optional - set(data)):
            raise ConfigError(f"costs lack the field {missing[0]!r}")
        return cls(**data)


def layer_bytes(sequence: int, batch: int, hidden: int, heads: int = 0) -> tuple[float, float]:
    """`act` and `stash` in bytes of one transformer layer and microbatch, in 16 bit.

    act = s b (34 h + 5 a s) (arXiv 2205.05198, section 4.1), whose second term falls away with
    flash attention (`heads` 0); stash = 32 s b h (arXiv 2401.10241, section 2).
    """
    tokens = sequence * batch
    return float(tokens * (34 * hidden + 5 * heads * sequence)), float(32 * tokens * hidden)


def _numbers(name: str, given: Sequence[float], stages: int) -> tuple[float, ...]:
    length = stages - 1 if name in ("comm", "boundary") else stages
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise ConfigError(f"{name} = {given!r}: want {length} numbers")
    if name in ("transient", "boundary") and not len(given):
        return (0.0,) * length
    if len(given) != length:
        raise ConfigError(f"{name} has {len(given)} entries: want {length}")
    for index, value in enumerate(given):
        if not _is_cost(value):
            raise ConfigError(f"{name}[{index}] = {value!r}: want a finite number ≥ 0")
    return tuple(float(value) for value in given)


def _is_cost(value: object) -> bool:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str) and math.isfinite(number) and number >= 0
