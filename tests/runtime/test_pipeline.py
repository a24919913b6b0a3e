"""What a pipeline does besides gradients: evaluation, hooks, random numbers, state, bad input."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbpipe
from cases import (
    CASES,
    SCHEDULES,
    WIDTH,
    Checkpointed,
    Map,
    block,
    masked,
    mse,
    regression,
    tokens,
)
from unsplit import assert_same_gradients, gradients, reference
from zbpipe import ConfigError, StageError
from zbpipe.runtime.planner import fused

BY_NAME = {case.name: case for case in CASES}


def wrapped(model, **options):
    defaults = {"microbatches": 4, "schedule": "zb1p", "loss_fn": mse, "local_ranks": 2}
    return zbpipe.wrap(model, **(defaults | options))


def batch():
    return regression((9, 4, WIDTH))[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_eval_between_steps_changes_nothing(schedule: str) -> None:
    case = BY_NAME["norms"]
    x, y = case.batches()[0]
    plain, mixed = case.build(), case.build()
    one = wrapped(plain, schedule=schedule)
    two = wrapped(mixed, schedule=schedule)
    for _ in range(2):
        one.step(x, target=y)
        two.step(x, target=y)
        value = two.eval_step(x[:7], target=y[:7])
        with torch.no_grad():
            mixed.eval()
            parts = [
                (mse(mixed(a), b), len(b))
                for a, b in zip(x[:7].tensor_split(4), y[:7].tensor_split(4), strict=True)
            ]
            mixed.train()
        torch.testing.assert_close(value, sum(part * n for part, n in parts) / 7)
    for a, b in zip(plain.state_dict().values(), mixed.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(plain.parameters(), mixed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_hooks_fire_once_a_parameter_after_its_last_w() -> None:
    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    for schedule in SCHEDULES:
        model = case.build()
        pipe = wrapped(model, schedule=schedule)
        want, _ = reference(case, 4)
        fired = []
        for (name, parameter), expected in zip(
            model.named_parameters(), want.parameters(), strict=True
        ):

            def hook(p, name=name, expected=expected, fired=fired):
                fired.append(name)
                torch.testing.assert_close(p.grad, expected.grad, rtol=1e-12, atol=1e-14)

            parameter.register_post_accumulate_grad_hook(hook)
        pipe.step(x, target=y)
        assert sorted(fired) == sorted(name for name, _ in model.named_parameters())


def test_optimizer_in_the_hook_leaves_no_gradient() -> None:
    model = BY_NAME["blocks"].build()
    before = [p.detach().clone() for p in model.parameters()]

    def step(p):
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    wrapped(model).step(batch()[0], target=batch()[1])
    assert all(p.grad is None for p in model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_dropout_depends_on_seed_step_stage_and_microbatch_only() -> None:
    def model():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(block(), nn.Dropout(0.5), block(), nn.Dropout(0.5)).double()

    x, y = batch()

    def losses(schedule: str, seed: int) -> list[float]:
        pipe = wrapped(model(), schedule=schedule, seed=seed)
        return [pipe.step(x, target=y).item() for _ in range(3)]

    state = torch.get_rng_state()
    first = losses("1f1b", 1)
    assert torch.equal(state, torch.get_rng_state())
    assert len(set(first)) == 3
    assert all(losses(schedule, 1) == first for schedule in SCHEDULES)
    assert losses("1f1b", 2) != first


def test_checkpointed_dropout_is_drawn_again_alike() -> None:
    def model():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            inner = [nn.Sequential(block(), nn.Dropout(0.5)) for _ in range(4)]
            return nn.Sequential(block(), *map(Checkpointed, inner)).double()

    x, y = batch()
    first = None
    for schedule in SCHEDULES:
        split = model()
        wrapped(split, schedule=schedule, partition=[2, 3]).step(x, target=y)
        first = first or gradients(split.named_parameters())
        for name, grad in gradients(split.named_parameters()).items():
            assert torch.equal(grad, first[name]), (schedule, name)


def test_a_fresh_wrap_of_the_same_layers_after_a_step_that_raised() -> None:
    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    model = case.build()

    def boom(output, target):
        raise ZeroDivisionError("planned")

    pipe = wrapped(model, loss_fn=boom)
    with pytest.raises(StageError, match=r"rank 1, stage 1, F of microbatch 0.*planned") as caught:
        pipe.step(x, target=y)
    assert (caught.value.rank, caught.value.stage) == (1, 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(StageError, match="planned"):  # spent, and it says why
        pipe.step(x, target=y)
    assert not any("forward" in module.__dict__ for module in model.modules())
    model.zero_grad()
    wrapped(model).step(x, target=y)
    want, _ = reference(case, 4)
    assert_same_gradients(gradients(model.named_parameters()), want, 1e-12)


def test_modules_stay_ordinary() -> None:
    model = BY_NAME["blocks"].build()
    x, y = batch()
    pipe = wrapped(model)
    pipe.step(x, target=y)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(pipe.parameters(), model.parameters(), strict=True))
    assert pipe.state_dict().keys() == model.state_dict().keys()


def test_two_pipelines_in_one_process() -> None:
    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    want, _ = reference(case, 4)
    models = [case.build(), case.build()]
    pipes = [wrapped(models[0], schedule="zb2p"), wrapped(models[1], schedule="1f1b")]
    for pipe in pipes:
        pipe.step(x, target=y)
    for model in models:
        assert_same_gradients(gradients(model.named_parameters()), want, 1e-12)


def test_autocast_reaches_the_stages() -> None:
    x, y = regression((8, 4, WIDTH), dtype=torch.float32)[0]
    seen = []

    def model():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(WIDTH, WIDTH), Map(lambda t: (seen.append(t.dtype), t)[1])]
            return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))

    plain = model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            (mse(plain(a), b) / 4).backward()
        split = model()
        wrapped(split).step(x, target=y)
    assert set(seen) == {torch.bfloat16}
    assert_same_gradients(gradients(split.named_parameters()), plain, 1e-2)


def test_clip_grad_norm_and_zero_grad() -> None:
    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    for norm_type in (2.0, 1.0, math.inf):
        want, _ = reference(case, 4)
        model = case.build()
        pipe = wrapped(model)
        pipe.step(x, target=y)
        norm = pipe.clip_grad_norm_(0.01, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(want.parameters(), 0.01, norm_type)
        torch.testing.assert_close(norm, expected)
        assert_same_gradients(gradients(model.named_parameters()), want, 1e-9)
        pipe.zero_grad()
        assert all(p.grad is None for p in model.parameters())


def test_save_and_load(tmp_path) -> None:
    from safetensors.torch import load_file

    model = BY_NAME["norms"].build()
    pipe = wrapped(model)
    pipe.save(tmp_path)
    (part,) = tmp_path.glob("*.safetensors")
    state = load_file(part)
    assert state.keys() == model.state_dict().keys()
    other = nn.Sequential(*[copy.deepcopy(layer) for layer in model])
    for p in other.parameters():
        nn.init.zeros_(p)
    wrapped(other).load_state_dict(state)
    for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match=r"0\.bias"):
        pipe.load_state_dict({k: v for k, v in state.items() if k != "0.bias"})


def test_a_schedule_from_a_file_and_an_object(tmp_path) -> None:
    from zbpipe.schedule import build

    case = BY_NAME["blocks"]
    x, y = case.batches()[0]
    want, _ = reference(case, 4)
    path = tmp_path / "order.csv"
    path.write_text(build("zb_h2", 2, 4).to_csv())
    for schedule in (path, str(path), build("1f1b", 2, 4)):
        model = case.build()
        wrapped(model, schedule=schedule).step(x, target=y)
        assert_same_gradients(gradients(model.named_parameters()), want, 1e-12)


def test_two_stages_on_a_rank_hand_over_without_a_message() -> None:
    """A V: four stages on two ranks, the turn is inside rank 1."""
    case = BY_NAME["pass_through"]
    x, y = case.batches()[0]
    first = "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1"
    second = "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1"
    schedule = zbpipe.Schedule.from_csv(f"{first}\n{second}\n")
    assert schedule.placement == (0, 1, 1, 0)
    model = case.build()
    pipe = wrapped(model, schedule=schedule, microbatches=2)
    before = pipe.eval_step(x, target=y)
    torch.testing.assert_close(before, pipe.step(x, target=y))
    want, _ = reference(case, 2)
    assert_same_gradients(gradients(model.named_parameters()), want, 1e-12)


def test_closing_frees_the_model() -> None:
    import weakref

    model = BY_NAME["blocks"].build()
    pipe = wrapped(model)
    pipe.step(*batch()[:1], target=batch()[1])
    ref = weakref.ref(model[0])
    del model, pipe
    gc.collect()
    assert ref() is None


def sequential(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))).double()


X, Y = torch.randn(8, WIDTH, dtype=torch.float64), torch.randn(8, WIDTH, dtype=torch.float64)


def test_timeline_and_summary() -> None:
    pipe = wrapped(sequential())
    with pytest.raises(zbpipe.ZbpipeError, match="before the first step"):
        pipe.timeline()
    assert "stage 1" in pipe.summary()
    pipe.step(X, target=Y)
    timeline = pipe.timeline()
    assert timeline.kind == "measured"
    for rank in range(2):
        got = [span.action for span in timeline.compute(rank)]
        assert tuple(got) == fused(pipe.plan.schedule).rows[rank]
    text = pipe.summary()
    assert (
        "rank 0 → 1: local" in text
        and "zb_h1" in text
        and "100.0% of W's FLOPs are deferred" in text
    )


def test_dict_inputs_and_shared_entries() -> None:
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, d):
            return self.inner(d["x"]) * d["mask"]

    def model():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(Masked(), nn.Linear(WIDTH, WIDTH)).double()

    # As many rows as the batch, and yet not to be split.
    mask = torch.rand(8, WIDTH, WIDTH, dtype=torch.float64)[:, 0][:, None, :].mean(0)
    value = {"x": X, "mask": mask.expand(8, WIDTH)[:1].expand(8, WIDTH)[0]}
    plain, split = model(), model()
    F.mse_loss(plain(value), Y).backward()
    wrapped(split, shared=["mask"]).step(value, target=Y)
    assert_same_gradients(gradients(split.named_parameters()), plain, 1e-12)


def test_loss_of_tokens_is_the_whole_batch_mean() -> None:
    case = BY_NAME["tokens"]
    x, y = tokens((11, 5))[0]
    model = case.build()
    loss = wrapped(model, loss_fn=masked, microbatches=4).step(x, target=y)
    torch.testing.assert_close(loss, masked(model(x), y).detach())


def test_a_loss_of_its_own() -> None:
    model = nn.Sequential(*sequential(), Map(lambda x: x.square().mean()))
    loss = wrapped(model, loss_fn=None).step(X)
    torch.testing.assert_close(loss, model(X).detach())
