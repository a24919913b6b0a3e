"""W's that a rank holds until the last of their run, as on CUDA: same bits, peak and hooks."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import zbpipe
from cases import CASES, CHUNKED, HALVES, Case
from families import batch, build
from unsplit import assert_same_gradients, gradients, reference
from zbpipe.runtime import rank as ranks
from zbpipe.runtime.device import CudaDevice, Device
from zbpipe.runtime.planner import fused
from zbpipe.runtime.stage import Stage
from zbpipe.schedule.core import Schedule

BY_NAME = {case.name: case for case in CASES}
SCHEDULES = ["zb1p", "zb2p", "zb_v", "v_half", "halves"]


@pytest.fixture
def calls(monkeypatch):
    """`calls(held)`: from now on ranks hold W's or not; the microbatches of each W that ran."""
    seen = []
    plain = Stage.weights

    def weights(self, *microbatches):
        seen.append((self.index, microbatches))
        plain(self, *microbatches)

    def begin(held: bool) -> list[tuple[int, tuple[int, ...]]]:
        monkeypatch.setattr(ranks, "groups", lambda device: held)
        monkeypatch.setattr(Stage, "weights", weights)
        seen.clear()
        return seen

    return begin


def wrapped(case: Case, schedule: str, m: int = 6, **options) -> tuple[nn.Module, zbpipe.Pipeline]:
    model = case.build()
    stages = 4 if schedule in CHUNKED else 2
    order = Schedule.from_csv(HALVES) if schedule == "halves" else schedule
    options = {"partition": case.split(stages)} | options
    pipe = zbpipe.wrap(
        model, microbatches=m, schedule=order, loss_fn=case.loss_fn,
        loss_weight=case.loss_weight, local_ranks=2, **options,
    )  # fmt: skip
    pipe._settings = replace(pipe._settings, poison=True)
    return model, pipe


def runs_of(pipe: zbpipe.Pipeline) -> set[tuple[int, tuple[int, ...]]]:
    return {
        (run[0].stage, tuple(a.microbatch for a in run)) for run in fused(pipe.plan.schedule).runs
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gradients_have_the_same_bits(calls, case, schedule) -> None:
    found = []
    for held in (False, True):
        done = calls(held)
        model, pipe = wrapped(case, schedule)
        for x, y in case.batches():
            pipe.step(x, target=y)
        grouped = {one for one in done if len(one[1]) > 1}
        assert grouped == (runs_of(pipe) if held else set())
        count = sum(a.kind == "W" for row in fused(pipe.plan.schedule).rows for a in row)
        assert sum(len(one[1]) for one in done) == len(case.batches()) * count
        pipe.close()
        found.append(gradients(model.named_parameters()))
    for name, one in found[0].items():
        other = found[1][name]
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other), name
    assert_same_gradients(found[1], reference(case, 6)[0], case.tolerance)
    assert runs_of(pipe) or schedule in ("zb_v", "v_half")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["blocks", "norms", "several_outputs"])
def test_holding_never_exceeds_the_planned_peak(calls, name, schedule) -> None:
    """What a run holds was held when it began; only the way down from there is another one."""
    case = BY_NAME[name]
    x, y = case.batches()[0]
    curves = []
    options = {"example": x}
    for held in (False, True):
        calls(held)
        _, pipe = wrapped(case, schedule, **options)
        options["partition"] = list(pipe._sizes)  # not by times that are measured anew
        pipe.measure_memory()
        pipe.step(x, target=y)
        timeline = pipe.timeline()
        for rank in range(2):
            assert timeline.peak(rank) <= pipe.plan.timeline.peak(rank) * (1 + 1e-9)
            assert timeline.memory[rank][-1][1] == 0
        curves.append([[held for _, held in curve] for curve in timeline.memory])
        pipe.close()
    if schedule == "halves":  # the others are searched, for costs that are measured anew
        assert curves[0] != curves[1]
        assert [max(curve) for curve in curves[0]] == [max(curve) for curve in curves[1]]


def test_a_trial_times_each_w_by_itself(calls) -> None:
    done = calls(True)
    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    _, pipe = wrapped(case, "halves", example=x)
    pipe.step(x, target=y)
    trials, step = done[:-4], done[-4:]
    assert len(trials) >= 3 * 2 * 6 and all(len(microbatches) == 1 for _, microbatches in trials)
    assert set(step) == runs_of(pipe)
    pipe.close()


def test_the_timeline_shows_a_run_under_its_last_w(calls, monkeypatch) -> None:
    """Held W's are spans of next to nothing; the rank's time is all there, in order."""
    calls(True)
    plain = Stage.weights
    monkeypatch.setattr(
        Stage, "weights", lambda self, *m: (torch.randn(200_000), plain(self, *m))[1]
    )
    case = BY_NAME["blocks"]
    _, pipe = wrapped(case, "halves")
    x, y = case.batches()[0]
    pipe.step(x, target=y)
    timeline, schedule = pipe.timeline(), fused(pipe.plan.schedule)
    for rank, row in enumerate(schedule.rows):
        spans = timeline.compute(rank)
        assert [span.action for span in spans] == list(row)
        assert all(a.end <= b.start for a, b in pairwise(spans))
        took = {span.action: span.end - span.start for span in spans}
        for run in schedule.runs:
            if schedule.placement[run[0].stage] == rank:
                assert all(0 <= took[held] < took[run[-1]] for held in run[:-1])
    pipe.close()


def test_hooks_fire_once_after_the_last_run(calls) -> None:
    done = calls(True)
    case = BY_NAME["blocks"]
    model, pipe = wrapped(case, "halves")
    fired = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, len(done))))
    x, y = case.batches()[0]
    pipe.step(x, target=y)
    assert sorted(name for name, _ in fired) == sorted(n for n, _ in model.named_parameters())
    last = {stage: at for at, (stage, _) in enumerate(done, 1)}
    names = {id(p): name for name, p in model.named_parameters()}
    home = {names[id(p)]: s.index for s in pipe._stages.values() for p in s.parameters}
    assert all(at >= last[home[name]] for name, at in fired)
    pipe.close()


@pytest.mark.parametrize("schedule", ["zb1p", "zb2p"])
def test_tied_gradients_are_handed_over_after_the_run(calls, schedule) -> None:
    found = []
    for held in (False, True):
        done = calls(held)
        model = build("llama-tied")
        pipe = zbpipe.wrap(model, microbatches=3, schedule=schedule, local_ranks=2)
        pipe.step(**batch())
        pipe.close()
        found.append(gradients(model.named_parameters()))
    assert any(len(m) > 1 for _, m in done)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_summary_names_the_runs(calls) -> None:
    calls(False)
    case = BY_NAME["blocks"]
    _, pipe = wrapped(case, "halves")
    assert "one launch a weight" not in pipe.summary()  # there is no plan yet
    x, y = case.batches()[0]
    pipe.step(x, target=y)
    text = pipe.summary()
    for s in range(2):
        runs = f"{s}W0 to {s}W2, {s}W3 to {s}W5"
        assert f"rank {s}: one launch a weight on CUDA for W's from {runs}" in text
    pipe.close()


def test_no_message_overwrites_what_a_held_w_reads(calls, monkeypatch) -> None:
    """Rank 1's Linear stashes the slot that it received; rank 0 is ahead with the next messages."""
    plain, found = ranks.Rank._weights, []

    def late(self, index, action):
        time.sleep(0.1 * action.stage * (action.microbatch == 2))  # not in the ranks' common lock
        plain(self, index, action)

    for held in (False, True):
        calls(held)
        monkeypatch.setattr(ranks.Rank, "_weights", late)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()
        pipe = zbpipe.wrap(
            model, microbatches=6, schedule=Schedule.from_csv(HALVES), local_ranks=2,
            loss_fn=nn.functional.mse_loss,
        )  # fmt: skip
        pipe._settings = replace(pipe._settings, poison=True)
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(12, 64, generator=generator, dtype=torch.float64) for _ in range(2))
        pipe.step(x, target=y)
        pipe.close()
        found.append(gradients(model.named_parameters()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_ranks_on_cuda_devices_hold_w() -> None:
    assert ranks.groups(CudaDevice(0)) and not ranks.groups(Device())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_unsplit_models_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda().bfloat16()
    plain = copy.deepcopy(model).float()
    x, y = (torch.randn(1536, 4096, device="cuda").bfloat16() for _ in range(2))
    pipe = zbpipe.wrap(
        model, microbatches=6, schedule=Schedule.from_csv(HALVES), local_ranks=2,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    pipe.step(x, target=y)
    pipe.close()
    nn.functional.mse_loss(plain(x.float()), y.float()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert float((p.grad.float() - q.grad).norm() / q.grad.norm()) < 2e-2
