"""Partitions against brute force over every way to cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zbpipe.errors import ConfigError
from zbpipe.model.partition import check_fixed, check_partition, layer_flops, partition

# Whole numbers, so that sums are exact and ties are ties.
costs_and_stages = st.lists(st.integers(0, 12), min_size=1, max_size=9).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def every_partition(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    return [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]


def stage_sums(costs: list[float], counts: tuple[int, ...]) -> list[float]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(costs_and_stages)
def test_partition_is_the_smoothest_of_the_best(case) -> None:
    costs, stages = case

    def rank(counts: tuple[int, ...]) -> tuple[object, ...]:
        sums = stage_sums(costs, counts)
        return max(sums), sum(s * s for s in sums), counts

    assert partition(costs, stages) == min(every_partition(len(costs), stages), key=rank)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=9).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
def test_partition_of_any_floats_is_best_to_rounding(case) -> None:
    costs, stages = case
    counts = check_partition(partition(costs, stages), len(costs), stages)
    best = min(max(stage_sums(costs, other)) for other in every_partition(len(costs), stages))
    assert max(stage_sums(costs, counts)) <= best * (1 + 1e-9) + 1e-9


@settings(derandomize=True, deadline=None, max_examples=300)
@given(costs_and_stages, st.data())
def test_given_stages_are_kept_and_the_rest_is_the_smoothest(case, data) -> None:
    costs, stages = case
    ways = every_partition(len(costs), stages)
    some = data.draw(st.sampled_from(ways))
    fixed = {s: some[s] for s in data.draw(st.sets(st.integers(0, stages - 1)))}

    def rank(counts: tuple[int, ...]) -> tuple[object, ...]:
        sums = stage_sums(costs, counts)
        return max(sums), sum(s * s for s in sums), counts

    kept = [way for way in ways if all(way[s] == n for s, n in fixed.items())]
    assert partition(costs, stages, fixed) == min(kept, key=rank)
    negative = {s - stages: n for s, n in fixed.items()}
    assert check_fixed(negative, len(costs), stages) == fixed


def test_known_cuts() -> None:
    assert partition([1] * 8, 4) == (2, 2, 2, 2)
    assert partition([0, *[12] * 8, 1], 2) == (5, 5)
    assert partition([3, 1, 1, 1], 2) == (1, 3)
    assert partition([1.0] * 96, 16) == (6,) * 16


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages=5 is more than the 3 layers.*at most 3"):
        partition([1, 1, 1], 5)
    with pytest.raises(ConfigError, match="stages=0"):
        partition([1], 0)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"costs\[1\]"):
            partition([1, cost], 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((4,), "one number of layers for each of the 2 stages"),
        ((4, 0), "stage 1 has 0 layers"),
        ((2, 2.0), "stage 1 has 2.0 layers"),
        ((2, True), "stage 1 has True layers"),
        ((2, 3), "must sum to 4"),
    ],
)
def test_a_wrong_partition_is_refused(given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_partition(given, layers=4, stages=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({4: 1}, "no stage 4 of 4"),
        ({"0": 1}, "no stage '0'"),
        ({0: 0}, "stage 0 has 0 layers"),
        ({0: 2, -4: 3}, "names stage 0 twice"),
        ({0: 6}, "leaves 2 of 8 layers for the other 3 stages"),
        ({0: 1, 1: 1, 2: 1, 3: 1}, "leaves 4 of 8 layers for the other 0 stages"),
    ],
)
def test_given_stages_that_cannot_be_are_refused(given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_fixed(given, layers=8, stages=4)


def test_a_right_partition_passes() -> None:
    assert check_partition([3, 1], layers=4, stages=2) == (3, 1)


def test_layer_flops_counts_matrices_and_no_embeddings() -> None:
    assert layer_flops(nn.Embedding(10, 4)) == 0
    assert layer_flops(nn.Linear(3, 5)) == 2 * 15
    assert layer_flops(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 2))) == 70
    tied = nn.ModuleList([nn.Embedding(10, 4), nn.Linear(4, 10)])
    tied[1].weight = tied[0].weight
    assert layer_flops(tied) == 80
    with torch.device("meta"):
        assert layer_flops(nn.Linear(3, 5)) == 30
