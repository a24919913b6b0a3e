"""Costs from trial runs, memory measured and planned, budgets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zbpipe
from cases import CASES, SCHEDULES, Map, mse
from unsplit import assert_same_gradients, gradients, reference
from zbpipe import MemoryBudgetError, Plan
from zbpipe.kernels import tables
from zbpipe.program import compile
from zbpipe.runtime.planner import RUN, fused, split_backward
from zbpipe.schedule import build
from zbpipe.schedule.check import check
from zbpipe.schedule.simulate import simulate

FUSABLE = ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "interleaved_zb", "dualpipe_v")
BY_NAME = {case.name: case for case in CASES}


def wrapped(model, **options):
    defaults = {"microbatches": 4, "schedule": "zb1p", "loss_fn": mse, "local_ranks": 2}
    return zbpipe.wrap(model, **(defaults | options))


def test_example_measures_costs_and_leaves_no_trace() -> None:
    case = BY_NAME["norms"]
    x, y = case.batches()[0]
    model = case.build()
    fired = []
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        p.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    state = torch.get_rng_state()
    pipe = wrapped(model, schedule="auto", example=x)
    pipe.step(x, target=y)
    assert torch.equal(state, torch.get_rng_state())
    assert len(fired) == len(list(model.parameters()))
    assert pipe.plan.costs.source == "profiled"
    costs = pipe.plan.costs
    assert min(costs.forward + costs.input_grad) > 0
    assert min(max(costs.act), max(costs.stash), max(costs.boundary)) > 0
    want, _ = reference(case, 4)
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p.grad - 1, q.grad, rtol=1e-10, atol=1e-12)
    for a, b in zip(model.buffers(), want.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["blocks", "tokens", "trees", "several_outputs", "norms"])
def test_measured_memory_never_exceeds_the_plan(schedule: str, name: str) -> None:
    case = BY_NAME[name]
    x, y = case.batches()[0]
    ranks = 3
    pipe = wrapped(
        case.build(), schedule=schedule, example=x, microbatches=6, local_ranks=ranks,
        loss_fn=case.loss_fn,
    )  # fmt: skip
    pipe.measure_memory()
    pipe.step(x, target=y)
    timeline = pipe.timeline()
    for rank in range(ranks):
        # A stage of "trees" multiplies by constants only; the first may hold nothing but the batch,
        # which is the user's.
        assert name == "trees" or rank == 0 or timeline.peak(rank) > 0
        assert timeline.peak(rank) <= pipe.plan.timeline.peak(rank) * (1 + 1e-9)
        assert timeline.memory[rank][-1][1] == 0  # everything was let go of


def test_the_largest_transient_is_in_the_planned_peak() -> None:
    """A layer that needs a big tensor for a moment, in F as in I, and keeps none of it."""

    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + torch.ones(100_000, dtype=x.dtype).sum() * 0

        @staticmethod
        def backward(ctx, dY):
            return dY + torch.ones(200_000, dtype=dY.dtype).sum() * 0

    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    model = nn.Sequential(*case.build(), Map(Wide.apply))
    pipe = wrapped(model, example=x, partition=[3, 3])
    pipe.step(x, target=y)
    small, big = pipe.plan.costs.transient
    assert 0 < small < 100_000
    assert 1_600_000 <= big < 1_700_000
    assert pipe.plan.peak(1) == pipe.plan.timeline.peak(1) + big


def test_an_evaluation_before_the_first_step_does_not_count_as_costs() -> None:
    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    plans = []
    for first in (False, True):
        pipe = wrapped(case.build(), example=x, partition=[2, 3])
        if first:
            pipe.eval_step(x.repeat(5, 1, 1), target=y.repeat(5, 1, 1))
            assert pipe.plan is None
        pipe.step(x, target=y)
        plans.append(pipe.plan)
    assert plans[0].costs.act == plans[1].costs.act


def test_memory_budget_is_kept_or_refused() -> None:
    case = BY_NAME["blocks"]
    x, y = case.batches()[0]

    def plan(schedule, memory):
        pipe = wrapped(case.build(), schedule=schedule, memory=memory, microbatches=8)
        pipe.step(x, target=y)
        return pipe.plan

    big = plan("zb2p", "1GiB")
    need = [big.peak(rank) for rank in range(2)]
    for schedule, memory in (("zb2p", need), ("auto", need[0] * 0.7), ("zb2p", need[0] * 0.7)):
        found = plan(schedule, memory)
        limits = memory if isinstance(memory, list) else [memory] * 2
        assert all(found.peak(rank) <= limits[rank] * (1 + 1e-9) for rank in range(2))
        assert found.cost >= found.bound * (1 - 1e-9)
    # A shape is taken as it is, or not at all.
    with pytest.raises(MemoryBudgetError, match=r"rank 1 \(stage 1\) lacks .* what would fit"):
        plan("gpipe", need[0] * 0.7)
    for schedule in ("auto", "zb2p"):
        with pytest.raises(MemoryBudgetError, match="rank 0"):
            plan(schedule, 100)


@pytest.mark.parametrize("schedule", ["zb1p", "zb2p", "auto"])
def test_a_searched_order_is_no_worse_than_the_shapes_and_just_as_right(schedule) -> None:
    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    model = case.build()
    pipe = wrapped(model, schedule=schedule, example=x, microbatches=6, partition=case.split(2))
    pipe.step(x, target=y)
    plan = pipe.plan
    names = ("zb_v",)  # "auto" may find that two stages a rank take less time
    if plan.costs.stages == 2:
        names = ("zb_h1",) if schedule == "zb1p" else ("zb_h1", "zb_h2")
    for name in names:
        assert plan.cost <= Plan.make(build(name, 2, 6), plan.costs).cost * (1 + 1e-9)
    want, _ = reference(case, 6)
    assert_same_gradients(gradients(model.named_parameters()), want, 1e-12)


@settings(max_examples=60)
@given(st.sampled_from(FUSABLE), st.integers(1, 5), st.integers(1, 9))
def test_a_fused_order_is_the_same_order_and_nobody_waits_longer(name, ranks, microbatches):
    schedule = build(name, ranks, microbatches)
    joined = fused(schedule)
    check(joined)
    assert split_backward(joined) == split_backward(schedule)
    costs = zbpipe.Costs.uniform(schedule.stages)
    assert simulate(joined, costs).makespan() == simulate(schedule, costs).makespan()
    for rank, row in enumerate(joined.rows):
        for a in set(row) - set(schedule.rows[rank]):
            assert a.kind == "B"
            assert a.stage == 0 or schedule.placement[a.stage - 1] == rank


def test_the_first_stage_of_zb_h1_is_fused() -> None:
    # Rank 0 delays no W; rank 1 does, and is waited for.
    assert [str(a) for a in fused(build("zb_h1", 2, 3)).rows[0]] == [
        "0F0", "0F1", "0B0", "0F2", "0B1", "0B2",
    ]  # fmt: skip
    assert fused(build("zb_h1", 2, 3)).rows[1] == build("zb_h1", 2, 3).rows[1]


@settings(max_examples=60)
@given(st.sampled_from(FUSABLE), st.integers(1, 5), st.integers(1, 9))
def test_runs_are_all_the_ws_that_follow_one_another(name, ranks, microbatches):
    joined = fused(build(name, ranks, microbatches))
    place = {a: (rank, i) for rank, row in enumerate(joined.rows) for i, a in enumerate(row)}
    follows = {
        (a, b)
        for row in joined.rows
        for a, b in pairwise(row)
        if a.kind == b.kind == "W" and a.stage == b.stage
    }
    inside = {pair for run in joined.runs for pair in pairwise(run)}
    assert inside <= follows and all(2 <= len(run) <= RUN for run in joined.runs)
    # What follows and is in no run together stands where a run was full.
    ends = {run[-1]: run for run in joined.runs}
    assert all(len(ends[a]) == RUN for a, _ in follows - inside)
    cells = [a for run in joined.runs for a in run]
    assert len(cells) == len(set(cells))
    for run in joined.runs:
        assert [a.microbatch for a in run] == sorted(a.microbatch for a in run)
        assert len({place[a][0] for a in run}) == 1


@settings(max_examples=60)
@given(st.sampled_from(FUSABLE), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_runs_need_no_more_slots(name, ranks, microbatches, tied):
    joined = fused(build(name, ranks, microbatches))
    assert compile(joined, tied=tied).slots == compile(replace(joined, runs=()), tied=tied).slots


def test_the_ws_that_are_left_at_the_end_are_a_run() -> None:
    # Rank 2 of ZB-H1 delays W by two microbatches.
    assert [[str(a) for a in run] for run in fused(build("zb_h1", 3, 6)).runs] == [
        ["1W4", "1W5"], ["2W3", "2W4", "2W5"],
    ]  # fmt: skip
    assert fused(build("1f1b", 3, 6)).runs == ()


def test_a_run_is_what_a_launch_takes() -> None:
    assert RUN == tables.MOST
