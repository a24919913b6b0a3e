"""What belongs to the user: buffers, hooks, the batch; and what a stage hands on of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zbpipe


class Counts(nn.Module):
    """Puts another tensor in its buffer's place, changes one in place, and hands one on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("flat", torch.zeros(4).expand(3, 4))

    def forward(self, x):
        self.calls = self.calls + 1
        self.written.add_(1)
        return self.linear(x), self.written


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), []

    def forward(self, value):
        x, written = value
        self.seen.append(float(written[0]))
        return self.linear(x)


@pytest.mark.parametrize("ranks", [1, 2])
def test_trial_runs_put_buffers_back_that_a_layer_replaced(ranks) -> None:
    first, last = Counts(), Takes()
    pipe = zbpipe.wrap(
        [first, last], microbatches=3, schedule="zb1p", local_ranks=ranks, loss_fn=F.mse_loss,
        example=torch.randn(6, 4), partition=[1, 1] if ranks == 2 else [2],
    )  # fmt: skip
    kept = first.written
    assert float(first.calls) == 0 and not first.written.any()
    last.seen.clear()
    pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert float(first.calls) == 3 and first.written is kept and kept.tolist() == [3, 3, 3]


def test_a_buffer_that_is_handed_on_is_what_it_was_then() -> None:
    for ranks, schedule in ((2, "gpipe"), (1, "gpipe"), (2, "zb2p")):
        first, last = Counts(), Takes()
        pipe = zbpipe.wrap(
            [first, last], microbatches=12, schedule=schedule, local_ranks=ranks,
            loss_fn=F.mse_loss, partition=[1, 1] if ranks == 2 else [2],
        )  # fmt: skip
        pipe.step(torch.randn(24, 4), target=torch.randn(24, 4))
        assert last.seen == [float(i) for i in range(1, 13)], (ranks, schedule)


def test_trial_runs_fire_no_hooks_on_gradients() -> None:
    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fired = []
    handle = model[0].weight.register_hook(lambda grad: fired.append(1))
    pipe = zbpipe.wrap(
        model, microbatches=2, schedule="zb1p", local_ranks=2, loss_fn=F.mse_loss,
        example=torch.randn(4, 4),
    )  # fmt: skip
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert len(fired) == 2
    handle.remove()
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert len(fired) == 2


def test_a_parameter_that_was_put_in_after_wrap_has_its_hook_fired_once() -> None:
    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = zbpipe.wrap(model, microbatches=4, schedule="1f1b", local_ranks=2, loss_fn=F.mse_loss)
    model[1].weight = nn.Parameter(torch.randn(4, 4))
    fired = []
    model[1].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
    assert len(fired) == 1 and torch.equal(fired[0], model[1].weight.grad)


def test_the_batch_is_not_the_first_stages_memory() -> None:
    model = [nn.Linear(64, 8), nn.Linear(8, 8)]
    x, y = torch.randn(64, 64), torch.randn(64, 8)
    pipe = zbpipe.wrap(
        model, microbatches=8, schedule="gpipe", local_ranks=2, loss_fn=F.mse_loss, example=x,
        memory=4 * 8 * 8 * 8 * 4,
    )  # fmt: skip
    pipe.step(x, target=y)
    assert pipe.plan.costs.act[0] == 0  # x is the user's, and nothing else is saved


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def forward(self, x):
        import weakref

        y = x + x
        self.made.append(weakref.ref(y))
        return y


def test_an_output_that_nobody_saves_is_not_kept() -> None:
    adds, alive = Adds(), []

    class Looks(nn.Module):
        def forward(self, x):
            alive.append(sum(ref() is not None for ref in adds.made))
            return x * 1.0

    model = [nn.Linear(4, 4), adds, Looks(), nn.Linear(4, 4)]
    pipe = zbpipe.wrap(
        model, microbatches=8, schedule="gpipe", local_ranks=2, loss_fn=F.mse_loss,
        partition=[2, 2],
    )  # fmt: skip
    pipe.step(torch.randn(16, 4), target=torch.randn(16, 4))
    gone = [ref() is None for ref in adds.made]
    assert all(gone) and max(alive) < 8


def test_clipping_is_the_same_number_everywhere_and_sees_nan() -> None:
    model = [nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)]
    for p in (p for m in model for p in m.parameters()):
        p.grad = torch.randn_like(p)
    pipe = zbpipe.wrap(model, microbatches=1, schedule="1f1b", local_ranks=2)
    want = torch.linalg.vector_norm(
        torch.cat([p.grad.double().flatten() for m in model for p in m.parameters()])
    )
    norm = pipe.clip_grad_norm_(1e9)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), want, rtol=1e-6, atol=0)
    model[0].weight.grad[0, 0] = float("nan")
    for kind in (2.0, float("inf")):
        assert torch.isnan(pipe.clip_grad_norm_(1.0, kind))
