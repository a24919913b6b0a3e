"""wrap and step over separate processes: the same answers as in one, and errors on every rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbpipe
from cases import CASES, CHUNKED, SCHEDULES, WIDTH, Map, mse, regression
from crews import Outcome, forked, lane_threads, shared_files
from unsplit import assert_same_gradients, gradients, reference
from zbpipe import ConfigError, MemoryBudgetError, ScheduleError, StageError

BY_NAME = {case.name: case for case in CASES}
((X, Y),) = regression((8, WIDTH))


def _joined(world: Any, fn: Callable[..., Any], path: str, args: tuple[Any, ...]) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=world.rank, world_size=world.size
    )
    try:
        return fn(world.rank, *args)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def ranks(tmp_path) -> Callable[..., list[Outcome]]:
    """ranks(fn, n, *args): fn(rank, *args) in n processes that have joined torch.distributed."""

    def run(fn: Callable[..., Any], count: int, *args: Any) -> list[Outcome]:
        return forked(_joined, count, fn, str(tmp_path / "store"), args)

    return run


def reraise(outcome: Outcome) -> None:
    """What the rank's own wrap or step raised."""
    if outcome.error is not None:
        raise outcome.error


def everyone(outcomes: list[Outcome]) -> list[Any]:
    """The values of all ranks, or all their errors: the others' are only consequences."""
    failed = [f"rank {o.rank}: {o.error!r}\n{o.trace}" for o in outcomes if o.error is not None]
    assert not failed, "\n".join(failed)
    return [outcome.get() for outcome in outcomes]


def layers(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(count)]


def wrapped(model: Any = None, **options: Any) -> zbpipe.Pipeline:
    defaults = {"microbatches": 4, "schedule": "zb1p", "loss_fn": mse, "timeout": 20.0}
    return zbpipe.wrap(model or layers(), **(defaults | options))


def _every_case(rank: int, count: int, schedules: tuple[str, ...], chunks: int) -> None:
    for case in CASES:
        m = 2 * count + 1
        if not case.fits(count * chunks, m):
            continue
        want, want_losses = reference(case, m)
        first = None
        for schedule in schedules:
            pipe = wrapped(
                case.build(),
                microbatches=m,
                schedule=schedule,
                partition=case.split(count * chunks),
                loss_fn=case.loss_fn,
                loss_weight=case.loss_weight,
            )
            losses = [pipe.step(x, target=y) for x, y in case.batches()]
            got = gradients(pipe.named_parameters())
            assert_same_gradients(got, want, case.tolerance)
            for loss, expected in zip(losses, want_losses, strict=True):
                error = abs(loss - expected)
                assert error <= max(case.tolerance, 1e-12) * abs(expected)
            first = first or (got, losses)
            assert all(torch.equal(a, b) for a, b in zip(losses, first[1], strict=True))
            for name in got.keys() & first[0].keys():  # placements put layers on other ranks
                grad = got[name]
                assert grad is None or torch.equal(grad, first[0][name]), (case.name, name)
            pipe.close()
    assert lane_threads() == shared_files() == []


@pytest.mark.parametrize(
    ("count", "schedules", "chunks"),
    [(2, SCHEDULES, 1), (4, SCHEDULES, 1), (2, CHUNKED, 2)],
    ids=["2", "4", "2-chunked"],
)
def test_every_feature_over_processes(ranks, count, schedules, chunks) -> None:
    everyone(ranks(_every_case, count, count, schedules, chunks))


def _many_steps(rank: int) -> list[float]:
    torch.manual_seed(1)
    pipe = wrapped(schedule="zb2p", example=X)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for i in range(12):
        x = X.roll(i, 0)[: 8 - i % 3]
        losses.append(pipe.step(x, target=Y[: len(x)]).item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if i % 4 == 3:
            losses.append(pipe.eval_step(x, target=Y[: len(x)]).item())
    timeline = pipe.timeline()
    assert {span.rank for span in timeline.spans} == {0, 1, 2}
    return losses


def test_steps_with_an_optimizer_agree_on_every_rank(ranks) -> None:
    first, *rest = everyone(ranks(_many_steps, 3))
    assert all(losses == first for losses in rest)
    torch.manual_seed(1)
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    want = []
    for i in range(12):
        x = X.roll(i, 0)[: 8 - i % 3]
        loss = mse(model(x), Y[: len(x)])
        loss.backward()
        want.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if i % 4 == 3:
            want.append(mse(model(x), Y[: len(x)]).item())
    assert first == pytest.approx(want, rel=1e-10)


def _saved(rank: int, directory: str) -> None:
    wrapped().save(directory)


def test_save_writes_one_model(ranks, tmp_path) -> None:
    from safetensors.torch import load_file

    everyone(ranks(_saved, 2, str(tmp_path / "out")))
    state = {}
    for part in (tmp_path / "out").glob("*.safetensors"):
        state |= load_file(part)
    model = nn.Sequential(*layers())
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


def _wrap_only(rank: int, options: list[dict[str, Any]], model: Any) -> None:
    wrapped(None if model is None else model(rank), **options[rank])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ([{}, {"schedule": "zbp1"}], ScheduleError, "zb1p"),
        ([{"microbatches": 0}, {}], ConfigError, "microbatches = 0"),
        ([{}, {"microbatches": 5}], ConfigError, "rank 1 wraps another model or other arguments"),
        ([{}, {"schedule": "1f1b"}], ConfigError, "schedule 1f1b, .* against .*zb_h1"),
        ([{"seed": 1}, {}], ConfigError, "seed 0 against .*seed 1"),
    ],
    ids=["schedule", "microbatches", "other-m", "other-schedule", "other-seed"],
)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(ranks, options, error, message) -> None:
    for outcome in ranks(_wrap_only, 2, options, None):
        with pytest.raises(error, match=message):
            reraise(outcome)


def _other_model(rank: int) -> list[nn.Module]:
    return layers(4 + rank)


def test_models_that_differ(ranks) -> None:
    for outcome in ranks(_wrap_only, 2, [{}, {}], _other_model):
        with pytest.raises(ConfigError, match="rank 1 wraps another model"):
            reraise(outcome)


def _three_layers(rank: int) -> list[nn.Module]:
    return layers(3)


def test_more_ranks_than_layers(ranks) -> None:
    for outcome in ranks(_wrap_only, 4, [{}] * 4, _three_layers):
        with pytest.raises(ConfigError, match=r"stages=4.*3 layers"):
            reraise(outcome)


def _step(rank: int, later: bool, batches: list[Any], options: dict[str, Any]) -> None:
    pipe = wrapped(**options)
    if later:
        pipe.step(X, target=Y)
    x, y = batches[rank]
    pipe.step(x, target=y)


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_batches_that_differ(ranks, later) -> None:
    other = Y.clone()
    other[3, 3] += 1
    batches = [(X, Y), (X, other), (X, Y)]
    for outcome in ranks(_step, 3, later, batches, {}):
        with pytest.raises(ConfigError, match=r"batch of rank \d differs from that of rank \d"):
            reraise(outcome)


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_a_batch_too_small_on_one_rank(ranks, later) -> None:
    batches = [(X, Y), (X[:3], Y[:3])]
    for outcome in ranks(_step, 2, later, batches, {}):
        with pytest.raises(ConfigError, match="3 samples for microbatches=4"):
            reraise(outcome)


def test_a_budget_that_nothing_fits(ranks) -> None:
    for outcome in ranks(_step, 2, False, [(X, Y)] * 2, {"memory": 64, "schedule": "auto"}):
        with pytest.raises(MemoryBudgetError, match=r"no schedule fits"):
            reraise(outcome)


def _vector(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).sum(-1)


def test_a_loss_that_is_no_scalar(ranks) -> None:
    for outcome in ranks(_step, 2, False, [(X, Y)] * 2, {"loss_fn": _vector}):
        with pytest.raises(ConfigError, match=r"rank 1: the loss has shape \(2,\)"):
            reraise(outcome)


def _other_call(rank: int) -> None:
    pipe = wrapped()
    pipe.step(X, target=Y)
    if rank == 1:
        pipe.eval_step(X, target=Y)
    else:
        pipe.step(X, target=Y)


def test_ranks_that_make_different_calls(ranks) -> None:
    for outcome in ranks(_other_call, 2):
        with pytest.raises(ConfigError, match="must make the same calls in the same order"):
            reraise(outcome)


class Fails(nn.Module):
    """An identity whose forward or backward does `what` at the third microbatch."""

    def __init__(self, what: Callable[[], None], backward: bool) -> None:
        super().__init__()
        self.what, self.backward, self.count = what, backward, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if self.backward:
            x.register_hook(self._gradient)
        else:
            self._look()
        return x

    def _gradient(self, grad: torch.Tensor) -> torch.Tensor:
        self._look()
        return grad

    def _look(self) -> None:
        self.count += 1
        if self.count == 3:
            self.what()


def _raise() -> None:
    raise ArithmeticError("planned")


def _stall() -> None:
    time.sleep(60)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # so that the step cannot be over before the main thread has seen it


def _failing(rank: int, what: Callable[[], None], backward: bool, timeout: float) -> None:
    model = layers()
    model.insert(3, Fails(what, backward))
    pipe = wrapped(model, partition=[1, 1, 3], timeout=timeout)
    try:
        pipe.step(X, target=Y)
    finally:
        pipe.close()


@pytest.mark.parametrize("backward", [False, True], ids=["F", "I"])
def test_a_stage_that_raises_is_named_on_every_rank(ranks, backward) -> None:
    letter = "I" if backward else "F"
    for outcome in ranks(_failing, 3, _raise, backward, 20.0):
        with pytest.raises(StageError, match="ArithmeticError: planned") as caught:
            reraise(outcome)
        error = caught.value
        assert (error.rank, error.stage, error.action, error.microbatch) == (2, 2, letter, 2)


@pytest.mark.parametrize("backward", [False, True], ids=["F", "I"])
def test_a_stage_that_stalls_is_named_on_every_rank(ranks, backward) -> None:
    letter = "I" if backward else "F"
    for outcome in ranks(_failing, 3, _stall, backward, 1.5):
        with pytest.raises(StageError, match="does not return") as caught:
            reraise(outcome)
        error = caught.value
        assert (error.rank, error.stage, error.action, error.microbatch) == (2, 2, letter, 2)


def test_a_rank_that_dies_is_named_on_every_other(ranks) -> None:
    *others, dead = ranks(_failing, 3, _die, False, 20.0)
    assert dead.exitcode == -signal.SIGKILL
    for outcome in others:
        with pytest.raises(StageError, match="died") as caught:
            reraise(outcome)
        error = caught.value
        assert (error.rank, error.stage, error.action, error.microbatch) == (2, 2, "F", 2)


def test_ctrl_c_on_one_rank_ends_all(ranks) -> None:
    *others, pressed = ranks(_failing, 3, _interrupt, False, 20.0)
    with pytest.raises(KeyboardInterrupt):
        reraise(pressed)
    for outcome in others:
        with pytest.raises(StageError, match="rank 2: interrupted"):
            reraise(outcome)


def _slow_but_moving(rank: int) -> float:
    model = [*layers(1), Map(lambda x: (time.sleep(0.15), x)[1]), *layers(1)]
    pipe = wrapped(model, timeout=0.6, microbatches=8)
    return pipe.step(X, target=Y).item()


def test_a_long_step_that_moves_is_no_stall(ranks) -> None:
    everyone(ranks(_slow_but_moving, 3))
