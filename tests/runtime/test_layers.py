"""What layers cost, measured one by one: no trace, like layers once, and stages that add up."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import zbpipe
from families import batch, build
from zbpipe.costs import Costs
from zbpipe.model import cut
from zbpipe.model.balance import stage_costs
from zbpipe.model.cut import measured_partition, take
from zbpipe.runtime.layers import layer_costs
from zbpipe.runtime.stage import Stage

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class Counting(nn.Module):
    """A linear layer that counts its calls, has a buffer, draws random numbers, and writes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = []

    def forward(self, x):
        self.calls.append(torch.is_grad_enabled())
        self.seen += 1
        return nn.functional.dropout(self.inner(x), 0.5).mul_(2)


def counting(widths) -> list[Counting]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [Counting(width) for width in widths]


def test_like_layers_are_measured_once_and_nothing_is_left_behind() -> None:
    model = counting([8] * 6)
    fired = []
    for module in model:
        for p in module.parameters():
            p.grad = torch.ones_like(p)
            p.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    state = torch.get_rng_state()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    given = x.clone()
    costs = layer_costs([Stage(i, [(str(i), m)], 0) for i, m in enumerate(model)], x)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, given)
    assert not fired and all(float(m.seen) == 0 for m in model)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for m in model for p in m.parameters())
    measured = [sum(m.calls) for m in model]
    assert measured[0] == measured[1] == measured[-1] > 1  # the ends always, and one in between
    assert measured[2:-1] == [0, 0, 0]
    assert costs.stages == 6 and costs.source == "profiled"
    assert len({costs.forward[i] for i in range(1, 5)}) == 1
    assert costs.boundary == (4 * 8 * 4,) * 5


@pytest.mark.parametrize("change", ["width", "frozen", "dtype"])
def test_other_layers_are_measured_by_themselves(change) -> None:
    model = counting([8] * 5)
    if change == "width":
        model[2:] = [nn.Linear(8, 64), *counting([64, 64])]
        other = 3
    elif change == "frozen":
        model[2].inner.requires_grad_(False)
        other = 2
    else:
        model[2].inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        other = 2
    x = torch.randn(4, 8)
    layer_costs([Stage(i, [(str(i), m)], 0) for i, m in enumerate(model)], x)
    assert sum(model[1].calls) > 1 and sum(model[other].calls) > 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral"])
def test_layers_of_a_decoder_add_up_to_its_stages(name) -> None:
    model, inputs = build(name), batch()
    pipe = zbpipe.wrap(
        model, microbatches=3, schedule="1f1b", local_ranks=2, example=inputs, partition=[2, 2]
    )
    pipe.step(**inputs)
    first = {key: value[:3] for key, value in inputs.items()}
    taken = take(model, "auto", pipe._settings)
    found = stage_costs(layer_costs(taken.alone(0), first), (2, 2))
    want = pipe.plan.costs
    for stage in range(2):
        # Each stage computes masks and the like for itself; layers alone count them each time.
        assert want.act[stage] <= found.act[stage] <= 1.3 * want.act[stage]
        assert found.stash[stage] == pytest.approx(want.stash[stage], rel=0.02)


def test_the_head_counts_with_the_last_layer() -> None:
    model, inputs = build("llama"), batch()
    settings = zbpipe.wrap(model, microbatches=3, schedule="1f1b", local_ranks=2)._settings
    costs = layer_costs(take(model, "auto", settings).alone(0), inputs)
    assert costs.act[3] > costs.act[1] == costs.act[2]
    assert costs.stash[3] > costs.stash[1]


def settled(ranks: int, **options):
    model = [nn.Linear(4, 4) for _ in range(8)]
    pipe = zbpipe.wrap(model, microbatches=8, local_ranks=ranks, **options)
    return pipe._settings, take(model, "auto", pipe._settings)


def test_auto_takes_a_v_where_memory_is_short(monkeypatch) -> None:
    x = torch.randn(8, 4)
    costs = Costs.uniform(8, 1.0, 1.0, 1.0, 0.01, 1.0, 0.5, "profiled")
    monkeypatch.setattr(cut, "layer_costs", lambda *_: costs)
    # Of 2p microbatches of a rank's activations ZB-H2 has no bubble; of 1p only a V has none.
    for budget, want, stages in ((2 * 4 * 4.0 + 8, "linear", 4), (4 * 2.0 + 1, "v", 8)):
        settings, taken = settled(4, schedule="auto", memory=budget)
        kind, sizes = measured_partition(settings, taken, x)
        assert (kind, len(sizes), sum(sizes)) == (want, stages, 8)


def test_a_v_found_by_auto_runs_and_is_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]).double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    loss = nn.functional.mse_loss(model(x), y)
    want = torch.autograd.grad(loss, list(model.parameters()))
    tried = []
    for kind in ("linear", "v"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "zbpipe.model.wrap.measured_partition",
                lambda *_, kind=kind: (kind, [3, 3] if kind == "linear" else [2, 1, 1, 2]),
            )
            pipe = zbpipe.wrap(
                model, microbatches=4, local_ranks=2, example=x,
                loss_fn=nn.functional.mse_loss,
            )  # fmt: skip
        model.zero_grad()
        assert torch.allclose(pipe.step(x, target=y), loss.detach())
        for p, g in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-10, atol=1e-12)
        tried.append(pipe.plan.schedule.placement)
    assert tried == [(0, 1), (0, 1, 1, 0)]


def test_a_dict_gives_some_stages_their_layers() -> None:
    pipe = zbpipe.wrap([nn.Linear(4, 4) for _ in range(8)], microbatches=2, local_ranks=3,
                       partition={0: 1, -1: 2}, schedule="1f1b")  # fmt: skip
    assert [len(stage) for stage in pipe._layers] == [1, 5, 2]


def test_meta_has_nothing_to_measure() -> None:
    with torch.device("meta"):
        model = [nn.Linear(4, 4) for _ in range(4)]
    pipe = zbpipe.wrap(model, microbatches=2, local_ranks=2, example=torch.randn(4, 4))
    assert [len(stage) for stage in pipe._layers] == [2, 2]
