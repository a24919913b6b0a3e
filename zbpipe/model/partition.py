"""Balance: how many consecutive layers each stage gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import nn

from zbpipe.errors import ConfigError


def partition(
    costs: Sequence[float], stages: int, fixed: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Layers per stage, contiguous and at least one each, with the smallest largest stage sum.

    `costs` are non-negative and of any one unit (seconds, FLOPs). `fixed`: stages whose number of
    layers is given. Among the partitions with the smallest maximum the smoothest is taken (least
    sum of squared stage sums), and among those the one whose first stages are shortest, so every
    rank computes the same. Exact: dynamic programming over (stages, layers), O(stages × layers²).
    Raises ConfigError if there are more stages than layers, or if a cost is negative, inf or nan.
    """
    if stages < 1:
        raise ConfigError(f"stages={stages}: must be at least 1")
    if stages > len(costs):
        raise ConfigError(
            f"stages={stages} is more than the {len(costs)} layers of the model, and every stage "
            f"needs a layer: use at most {len(costs)} stages (fewer ranks or chunks), or cut the "
            "model into smaller layers"
        )
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ConfigError(f"costs[{layer}]={cost}: must be a number that is not negative")
    cuts = _Cuts(len(costs), stages, fixed or {})
    sums = [0.0, *accumulate(costs)]
    return _smoothest(sums, cuts, _smallest_maximum(sums, cuts))


class _Cuts:
    """Where a stage may end that starts at a layer, so that all others get theirs."""

    def __init__(self, layers: int, stages: int, fixed: Mapping[int, int]) -> None:
        self.layers, self.stages, self._fixed = layers, stages, fixed
        least = [fixed.get(stage, 1) for stage in range(stages)]
        self._left = [sum(least[stage:]) for stage in range(stages + 1)]  # at least, from here on

    def ends(self, stage: int, start: int) -> Sequence[int]:
        if stage == self.stages - 1:
            return (self.layers,) if self._fits(stage, self.layers - start) else ()
        if stage in self._fixed:
            end = start + self._fixed[stage]
            return (end,) if end + self._left[stage + 1] <= self.layers else ()
        return range(start + 1, self.layers - self._left[stage + 1] + 1)

    def _fits(self, stage: int, count: int) -> bool:
        return count >= 1 and count == self._fixed.get(stage, count)


def _smallest_maximum(sums: Sequence[float], cuts: _Cuts) -> float:
    """The least possible largest stage sum; `sums` are the prefix sums of the costs."""
    after = {cuts.layers: 0.0}
    for stage in range(cuts.stages - 1, -1, -1):
        row = {}
        for start in range(cuts.layers) if stage else (0,):
            options = [
                max(sums[end] - sums[start], after[end])
                for end in cuts.ends(stage, start)
                if end in after
            ]
            if options:
                row[start] = min(options)
        after = row
    return after[0]


def _smoothest(sums: Sequence[float], cuts: _Cuts, bound: float) -> tuple[int, ...]:
    """The partition with stage sums ≤ `bound` and the least sum of their squares."""
    # best[stage][start]: (sum of squares, first cut) of the stages from `stage` on
    best: list[dict[int, tuple[float, int]]] = [{cuts.layers: (0.0, cuts.layers)}]
    for stage in range(cuts.stages - 1, -1, -1):
        after, row = best[-1], {}
        for start in range(cuts.layers):
            options = [
                ((sums[end] - sums[start]) ** 2 + after[end][0], end)
                for end in cuts.ends(stage, start)
                if end in after and sums[end] - sums[start] <= bound
            ]
            if options:
                row[start] = min(options)
        best.append(row)
    places = [0]
    for row in reversed(best[1:]):
        places.append(row[places[-1]][1])
    return tuple(after - before for before, after in pairwise(places))


def check_fixed(fixed: Mapping[int, int], layers: int, stages: int) -> dict[int, int]:
    """Layers of some stages (negative ones count from the end), if the others can have the rest.

    Raises ConfigError saying what would be right.
    """
    found: dict[int, int] = {}
    for stage, count in fixed.items():
        if isinstance(stage, bool) or not isinstance(stage, int) or not -stages <= stage < stages:
            raise ConfigError(f"partition={fixed}: there is no stage {stage!r} of {stages}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"partition={fixed}: stage {stage} has {count!r} layers; every stage needs a whole "
                "number of at least 1"
            )
        if found.setdefault(stage % stages, count) != count:
            raise ConfigError(f"partition={fixed} names stage {stage % stages} twice")
    rest, others = layers - sum(found.values()), stages - len(found)
    if rest < others or (not others and rest):
        raise ConfigError(
            f"partition={fixed} leaves {rest} of {layers} layers for the other {others} stages: "
            "want at least one for each of them, and none left over"
        )
    return found


def check_partition(partition: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """The layers per stage that a user gave, if they are `stages` counts ≥ 1 that sum to `layers`.

    Raises ConfigError saying what would be right.
    """
    given = tuple(partition)
    if len(given) != stages:
        raise ConfigError(
            f"partition={given} has {len(given)} entries: give one number of layers for each of "
            f"the {stages} stages"
        )
    for stage, count in enumerate(given):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"partition={given}: stage {stage} has {count!r} layers; every stage needs a whole "
                "number of at least 1"
            )
    if sum(given) != layers:
        raise ConfigError(
            f"partition={given} places {sum(given)} layers, but the model has {layers}: the "
            f"entries must sum to {layers}"
        )
    return given


def layer_flops(module: nn.Module) -> float:
    """Forward FLOPs a token, by proxy: 2 for each element of a matrix-like parameter.

    Counted are the parameters of two or more dimensions, in every module that uses them (a weight
    that two modules share works twice). Embeddings are look-ups: 0. Attention's own product, which
    grows with the sequence and not with parameters, is not seen; measured times are better.
    """
    return 2.0 * sum(
        parameter.numel()
        for child in module.modules()
        if not isinstance(child, (nn.Embedding, nn.EmbeddingBag))
        for parameter in child._parameters.values()
        if parameter is not None and parameter.dim() >= 2
    )
