"""bf16 weights: a step's gradients are summed in fp32 and rounded once, or kept in `.main_grad`."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import zbpipe
from families import batch, build
from zbpipe.runtime import batch as cutting

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
MICROBATCHES = 32


def layers() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 4)
        ).bfloat16()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.rand(2 * MICROBATCHES, 8, generator=g).bfloat16()  # one-sided: sums that grow
    return x, torch.rand(2 * MICROBATCHES, 4, generator=g).bfloat16() + 1


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target.float()).square().mean()


def wrapped(model: nn.Module, schedule: str, ranks: int = 2) -> zbpipe.Pipeline:
    return zbpipe.wrap(
        model, microbatches=MICROBATCHES, schedule=schedule, local_ranks=ranks, loss_fn=loss_fn,
        partition=[3, 2] if ranks == 2 else [5],
    )  # fmt: skip


def per_microbatch() -> list[dict[str, torch.Tensor]]:
    """What each microbatch alone gives, in bf16 arithmetic but for the sum over microbatches."""
    model = layers()
    x, y = data()
    size, found = len(x), []
    xs = cutting.microbatches(x, MICROBATCHES, size)
    for part, target in zip(xs, cutting.microbatches(y, MICROBATCHES, size), strict=True):
        model.zero_grad()
        (loss_fn(model(part), target) / MICROBATCHES).backward()
        found.append({name: p.grad.double() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "zb2p"])
def test_sums_are_rounded_once_and_optimizers_take_them(schedule) -> None:
    model = layers()
    dtypes = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dtypes.append(p.grad.dtype))
    x, y = data()
    wrapped(model, schedule).step(x, target=y)
    parts, wide, narrow = per_microbatch(), [], []
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.bfloat16 and p.grad_dtype == torch.bfloat16
        exact = sum(part[name] for part in parts)
        scale = float(exact.abs().max())
        # Half a unit in the last place of 8 bits, and the rounding of each microbatch's own part.
        wide.append(float((p.grad.double() - exact).abs().max()) / scale)
        plain = torch.zeros_like(p)
        for part in parts:
            plain += part[name].bfloat16()
        narrow.append(float((plain.double() - exact).abs().max()) / scale)
    assert max(wide) <= 2**-8
    assert sum(narrow) > 2 * sum(wide)  # what summing in bf16 would have come to
    assert dtypes == [torch.bfloat16] * 8
    torch.optim.AdamW(model.parameters()).step()


def test_bits_do_not_depend_on_the_schedule_and_steps_add_up() -> None:
    x, y = data()
    found = []
    for schedule, ranks in (("gpipe", 2), ("1f1b", 2), ("zb1p", 2), ("zb2p", 2)):
        model = layers()
        pipe = wrapped(model, schedule, ranks)
        for _ in range(2):
            pipe.step(x, target=y)
        found.append([p.grad for p in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_main_grad_keeps_the_sum_in_fp32() -> None:
    model = layers()
    linear = [m for m in model if isinstance(m, nn.Linear)]
    for p in (p for m in linear for p in m.parameters()):
        p.main_grad = torch.zeros(p.shape)
    x, y = data()
    wrapped(model, "zb2p").step(x, target=y)
    parts = per_microbatch()
    for name, p in model.named_parameters():
        if hasattr(p, "main_grad"):
            assert p.grad is None
            exact = sum(part[name] for part in parts)
            error = (p.main_grad.double() - exact).abs().max() / exact.abs().max()
            assert float(error) < 2**-9


def test_trial_runs_leave_main_grad_alone() -> None:
    model = layers()
    for p in model.parameters():
        p.main_grad = torch.zeros(p.shape)
    x, y = data()
    pipe = zbpipe.wrap(
        model, microbatches=MICROBATCHES, schedule="zb2p", local_ranks=2, loss_fn=loss_fn,
        example=x, partition={0: 3},
    )  # fmt: skip
    assert all(not p.main_grad.any() for p in model.parameters())
    pipe.step(x, target=y)
    once = layers()
    for p in once.parameters():
        p.main_grad = torch.zeros(p.shape)
    wrapped(once, "1f1b").step(x, target=y)
    for p, q in zip(model.parameters(), once.parameters(), strict=True):
        assert torch.equal(p.main_grad, q.main_grad)


def test_a_step_that_raises_leaves_gradients_in_the_weights_dtype() -> None:
    model = layers()
    for p in model.parameters():
        p.grad = torch.ones_like(p)

    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    model[4] = Fails()
    x, y = data()
    with pytest.raises(zbpipe.StageError):
        wrapped(model, "zb1p").step(x, target=y)
    assert all(p.grad.dtype == p.grad_dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "zb2p", "zb_v"])
@pytest.mark.parametrize("main", [False, True])
def test_tied_embeddings_in_bf16(schedule, main) -> None:
    inputs = batch()
    model = build("llama-tied", dtype=torch.bfloat16)
    tied = model.model.embed_tokens.weight
    fired = []
    tied.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    if main:
        tied.main_grad = torch.ones(tied.shape)
    pipe = zbpipe.wrap(model, microbatches=3, schedule=schedule, local_ranks=2)
    pipe.step(**inputs)
    want = build("llama-tied", dtype=torch.float32)
    want.load_state_dict(model.state_dict())
    want(**inputs, use_cache=False).loss.backward()
    exact = want.model.embed_tokens.weight.grad
    got = tied.main_grad - 1 if main else tied.grad
    assert got.dtype == (torch.float32 if main else torch.bfloat16)
    assert float((got.float() - exact).abs().max() / exact.abs().max()) < 0.03
    assert len(fired) == 1 and (tied.grad is None) == main
