"""Balance: how many consecutive layers each stage gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from zbpipe.errors import ConfigError


def partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage, contiguous and at least one each, with the smallest largest stage sum.

    `costs` are non-negative and of any one unit (seconds, FLOPs). Among the partitions with the
    smallest maximum the smoothest is taken (least sum of squared stage sums), and among those the
    one whose first stages are shortest, so every rank computes the same. Exact, by dynamic
    programming over (stages, layers): O(stages × layers²).
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
    sums = [0.0, *accumulate(costs)]
    bound = _smallest_maximum(sums, stages)
    return _smoothest(sums, stages, bound)


def _smallest_maximum(sums: Sequence[float], stages: int) -> float:
    """The least possible largest stage sum; `sums` are the prefix sums of the costs."""
    layers = len(sums) - 1
    best = [sums[layers] - sums[start] for start in range(layers)]  # one stage from `start` on
    for count in range(2, stages + 1):
        last = layers - count + 1  # the last place for the first cut
        best = [
            min(max(sums[cut] - sums[start], best[cut]) for cut in range(start + 1, last + 1))
            for start in range(last)
        ]
    return best[0]


def _smoothest(sums: Sequence[float], stages: int, bound: float) -> tuple[int, ...]:
    """The partition with stage sums ≤ `bound` and the least sum of their squares."""
    layers = len(sums) - 1
    # best[count][start]: (sum of squares, first cut) of `count` stages from `start` to the end
    Entry = tuple[float, int]
    best: list[dict[int, Entry]] = [{layers: (0.0, layers)}]
    for count in range(1, stages + 1):
        row: dict[int, Entry] = {}
        for start in range(layers - count + 1):
            options = [
                ((sums[cut] - sums[start]) ** 2 + tail, cut)
                for cut, (tail, _) in best[-1].items()
                if cut > start and sums[cut] - sums[start] <= bound
            ]
            if options:
                row[start] = min(options)
        best.append(row)
    cuts = [0]
    for count in range(stages, 0, -1):
        cuts.append(best[count][cuts[-1]][1])
    return tuple(after - before for before, after in pairwise(cuts))


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
