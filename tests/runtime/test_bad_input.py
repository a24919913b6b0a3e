"""Input that cannot be right: a clear error, before anything has started or been lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zbpipe
from cases import CASES, WIDTH, Map, masked, mse
from zbpipe import ConfigError, ScheduleError

BY_NAME = {case.name: case for case in CASES}


def wrapped(model, **options):
    defaults = {"microbatches": 4, "schedule": "zb1p", "loss_fn": mse, "local_ranks": 2}
    return zbpipe.wrap(model, **(defaults | options))


def sequential(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))).double()


BAD_WRAP = [
    ({"microbatches": 0}, ConfigError, "microbatches = 0"),
    ({"microbatches": 2.5}, ConfigError, r"microbatches = 2\.5"),
    ({"local_ranks": 5}, ConfigError, r"5.*4 layers"),
    ({"local_ranks": 0}, ConfigError, "local_ranks = 0"),
    ({"schedule": "zbp1"}, ScheduleError, "zb1p"),
    ({"schedule": 7}, ConfigError, "schedule is a int"),
    ({"schedule": "missing.csv"}, ScheduleError, "no such file"),
    ({"partition": [1, 2]}, ConfigError, "4"),
    ({"partition": "even"}, ConfigError, "partition = 'even'"),
    ({"memory": "lots"}, ConfigError, "memory = 'lots'"),
    ({"memory": [1, 2, 3]}, ConfigError, "memory has 3"),
    ({"timeout": 0}, ConfigError, "timeout = 0"),
    ({"loss_fn": 3}, ConfigError, "loss_fn is a int"),
    ({"shared": "mask"}, ConfigError, "shared = 'mask'"),
    ({"seed": "a"}, ConfigError, "seed = 'a'"),
    ({"mesh": object()}, ConfigError, "mesh"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_WRAP, ids=lambda v: str(v)[:30])
def test_bad_arguments_of_wrap(options, error, message) -> None:
    with pytest.raises(error, match=message):
        wrapped(sequential(), **options)


def test_a_schedule_for_other_ranks_is_refused() -> None:
    from zbpipe.schedule import build

    with pytest.raises(ScheduleError, match=r"3 ranks .* want 2 ranks and microbatches=4"):
        wrapped(sequential(), schedule=build("1f1b", 3, 4))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "nn.Sequential, a list of layers"),
        ([], "no layers"),
        ([nn.Linear(2, 2), "x"], r"model\[1\] is a str"),
        ({"a": nn.Linear(2, 2)}, "is a dict"),
    ],
    ids=["module", "empty", "string", "dict"],
)
def test_bad_models(model, message) -> None:
    with pytest.raises(ConfigError, match=message):
        wrapped(model)


def test_a_parameter_of_two_stages_is_refused() -> None:
    a, b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    b.weight = a.weight
    with pytest.raises(ConfigError, match=r"0\.weight of stage 0 and 1\.weight of stage 1"):
        wrapped([a, b])


X, Y = torch.randn(8, WIDTH, dtype=torch.float64), torch.randn(8, WIDTH, dtype=torch.float64)
BAD_STEP = [
    ((X[:3],), {"target": Y[:3]}, "3 samples for microbatches=4"),
    ((X,), {"target": Y[:7]}, r"target has shape \(7, 6\)"),
    ((X,), {}, "target is missing"),
    ((X, X), {"target": Y}, "got 2 inputs"),
    ((), {"input_ids": X, "target": Y}, "'input_ids'"),
    ((3,), {"target": Y}, "no tensor with a batch"),
]


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(("args", "kwargs", "message"), BAD_STEP, ids=lambda v: str(v)[:12])
def test_bad_batches(args, kwargs, message, later) -> None:
    pipe = wrapped(sequential())
    if later:
        pipe.step(X, target=Y)
    with pytest.raises(ConfigError, match=message):
        pipe.step(*args, **kwargs)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda o, t: (o - t) ** 2, r"shape \(2, 6\)"),
        (lambda o, t: 0.5, "is a float"),
        (lambda o, t: (o - t).sum().int(), "int32"),
    ],
    ids=["vector", "float", "int"],
)
def test_a_loss_that_is_no_scalar(loss_fn, message) -> None:
    with pytest.raises(ConfigError, match=message):
        wrapped(sequential(), loss_fn=loss_fn).step(X, target=Y)


def test_no_loss_at_all() -> None:
    with pytest.raises(ConfigError, match="give wrap a loss_fn"):
        wrapped(sequential(), loss_fn=None).step(X)


def test_weights_that_cannot_be() -> None:
    case = BY_NAME["ignored"]
    x, y = case.batches()[0]
    options = {"loss_fn": masked, "microbatches": 2}
    with pytest.raises(ConfigError, match="no loss"):
        wrapped(case.build(), loss_weight=lambda t: 0, **options).step(x, target=y)
    with pytest.raises(ConfigError, match=r"loss_weight is -1\.0 for microbatch 0"):
        wrapped(case.build(), loss_weight=lambda t: -1, **options).step(x, target=y)


def test_what_cannot_travel_is_refused() -> None:
    class Box:
        def __init__(self, x):
            self.x = x

    model = [nn.Linear(WIDTH, WIDTH).double(), Map(Box), Map(lambda b: b.x), Map(lambda x: x)]
    with pytest.raises(ConfigError, match=r"output of stage 0 holds a .*Box"):
        wrapped(model, partition=[2, 2]).step(X, target=Y)


def test_bad_partition_is_told_before_ranks_are_started() -> None:
    with pytest.raises(ConfigError):
        wrapped(sequential(), partition=[0, 4])
