"""A model taken apart into layers, and how many of them each stage gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..costs import Costs
from ..errors import ConfigError, MemoryBudgetError
from ..plan import Plan
from ..runtime import planner
from ..runtime.batch import batch_size, check_size, microbatches
from ..runtime.layers import layer_costs
from ..runtime.pipeline import Cut, Settings
from ..runtime.stage import Stage
from .balance import Balanced, balance, stage_costs
from .hf import Decoder, is_hf, take_apart, tied
from .partition import check_fixed, check_partition, layer_flops
from .stages import Layer, cut, layers_of

# Seconds to search an order for each placement, while the other ranks wait in wrap.
_SEARCH_S = 1.0
# A V placement sends twice as much: take it where it saves at least this share of the step.
_V_GAIN = 0.01


@dataclass(frozen=True)
class Taken:
    """The model's layers, how many of them each stage gets, and the decoder they are of, if one.

    `fixed`: stages whose number of layers the user gave, None where they all are.
    """

    layers: list[Layer]
    sizes: Sequence[int]
    fixed: Mapping[int, int] | None
    decoder: Decoder | None = None

    def cut(self) -> Cut:
        """The stages. Raises ConfigError where two of them share what they cannot share."""
        if self.decoder is None:
            return Cut(cut(self.layers, self.sizes), self.sizes)
        stages = self.decoder.stage_layers(self.sizes)
        runners = [self.decoder.runner(self.sizes, i) for i in range(len(stages))]
        everywhere = [module for _, module in self.decoder.before]
        return Cut(stages, self.sizes, runners, self.decoder.model, everywhere, tied(stages))

    def alone(self, seed: int) -> list[Stage]:
        """Each layer as a stage of its own, to be measured."""
        if self.decoder is None:
            return [Stage(i, [layer], seed) for i, layer in enumerate(self.layers)]
        ones = [1] * len(self.layers)
        return [
            Stage(i, layers, seed, run=self.decoder.runner(ones, i))
            for i, layers in enumerate(self.decoder.stage_layers(ones))
        ]

    def on_meta(self) -> bool:
        """Whether there are parameters without numbers."""
        return any(p.is_meta for _, module in self.layers for p in module.parameters())


def take(model: Any, partition: Any, settings: Settings) -> Taken:
    """Take `model` apart, and cut it by `partition` or, where that is "auto", by parameters.

    Raises ConfigError for a model or a partition that cannot be cut so.
    """
    decoder = take_apart(model) if is_hf(model) else None
    if decoder is None:
        layers = layers_of(model)
        flops = [layer_flops(module) for _, module in layers]
    else:
        layers = [(f"{decoder.path}.{i}", layer) for i, layer in enumerate(decoder.layers)]
        flops = decoder.costs()
    schedule = settings.schedules[0]
    fixed: dict[int, int] | None = None
    if isinstance(partition, str) and partition != "auto":
        raise ConfigError(f'partition = {partition!r}: want "auto" or layers per stage')
    if isinstance(partition, str):
        fixed = {}
    elif isinstance(partition, Mapping):
        fixed = check_fixed(partition, len(layers), schedule.stages)
    if fixed is None:
        sizes: Sequence[int] = check_partition(partition, len(layers), schedule.stages)
    else:
        sizes = balance(_by_flops(flops), schedule, fixed=fixed).sizes
    taken = Taken(layers, list(sizes), fixed, decoder)
    taken.cut()  # so that sharing that cannot be is an error on every rank
    return taken


def _by_flops(flops: Sequence[float]) -> Costs:
    """Costs of the layers where only their FLOPs are known: F, I and W take the same."""
    n = len(flops)
    nothing = (0.0,) * n
    times = tuple(flops)
    return Costs(times, times, times, (0.0,) * (n - 1), nothing, nothing, nothing, (0.0,) * (n - 1))


def measured_partition(settings: Settings, taken: Taken, example: Any) -> tuple[str, list[int]]:
    """Placement ("linear", "v" or the schedule's own, "") and layers per stage, by measured costs.

    For "auto" every placement is tried that has layers enough, each with an order searched for it.
    """
    count = settings.microbatches
    size = batch_size(example)
    check_size(size, count)
    first = microbatches(example, count, size, settings.shared)[0]
    costs = layer_costs(taken.alone(settings.seed), first)
    ranks = settings.schedules[0].ranks
    if settings.search != "auto" or taken.fixed or len(taken.layers) < 2 * ranks or ranks == 1:
        found = _balanced(settings, taken, costs)
        return "", list(found.sizes)
    options = []
    for kind in planner.AUTO:
        there = placed(settings, kind)
        found = _balanced(there, taken, costs)
        plan = _planned(there, stage_costs(costs, found.sizes))
        if plan is not None:
            cost = plan.cost * (1 + (_V_GAIN if kind == "v" else 0))
            options.append((cost, kind, list(found.sizes)))
    if not options:  # the first step says what would fit
        return "linear", list(_balanced(settings, taken, costs).sizes)
    _, kind, sizes = min(options, key=lambda option: option[0])
    return kind, sizes


def _balanced(settings: Settings, taken: Taken, costs: Costs) -> Balanced:
    return balance(costs, settings.schedules[0], settings.memory, taken.fixed)


def _planned(settings: Settings, costs: Costs) -> Plan | None:
    try:
        return planner.choose(
            settings.schedules[0], settings.search, costs, settings.memory, _SEARCH_S
        )
    except MemoryBudgetError:
        return None


def placed(settings: Settings, placement: str) -> Settings:
    """The same settings with "auto" over another placement; "": as they are."""
    if not placement:
        return settings
    old = settings.schedules[0]
    new = planner.resolve("auto", old.ranks, old.microbatches, placement)
    return replace(settings, schedules=tuple(new))
