"""torch.compile around and inside a split stage: one graph, right gradients, an honest report."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import assert_close, gradients, run_plain
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zbpipe
from zbpipe.model.split import Deferred, Splitter

BACKENDS = ["aot_eager", "inductor"]
MICROBATCHES = 10  # more than torch compiles one function for (recompile_limit, 8)


@pytest.fixture(params=BACKENDS)
def backend(request):
    """A backend of torch.compile, with nothing compiled and nothing counted yet."""
    torch._dynamo.reset()
    counters.clear()
    yield request.param
    torch._dynamo.reset()


class Mixed(nn.Module):
    """A module of each rule that is on by default, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(11, 8), nn.Linear(8, 12)
        self.norm, self.conv = nn.LayerNorm(12), nn.Conv1d(12, 12, 3, padding=1)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.up(self.embed(tokens)).relu())
        return self.down(self.conv(x.mT).mT)


def test_a_compiled_stage_is_one_graph_for_all_microbatches(backend) -> None:
    torch.manual_seed(0)
    stage = Mixed().double()
    plain = copy.deepcopy(stage)
    run = torch.compile(stage, backend=backend, fullgraph=True)
    splitter = Splitter(stage)
    xs = [torch.randint(11, (2, 5)) for _ in range(MICROBATCHES)]
    dYs = [torch.randn(2, 5, 8, dtype=torch.float64) for _ in xs]
    want = run_plain(plain, xs, dYs)
    for x, dY, y in zip(xs, dYs, want, strict=True):
        entry = Deferred()
        with splitter.active(entry):
            got = run(x)
        with splitter.active(entry):
            torch.autograd.backward(got, dY)
        entry.run()
        assert_close(got.detach(), y, 1e-12)
    for (name, g), w in zip(gradients(stage).items(), gradients(plain).values(), strict=True):
        assert_close(g, w, 1e-12, name)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


class Own(nn.Module):
    """A block that does its work as `how` says."""

    def __init__(self, how: str, backend: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, 12), nn.Linear(12, 8), how
        if how == "forward":
            self.forward = torch.compile(self.forward, backend=backend)
        if how == "method":
            self.inner = torch.compile(self.work, backend=backend)
        self.backend = backend

    def work(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "method":
            return self.inner(x)
        if self.how == "function":
            return torch.compile(work, backend=self.backend)(self, x)
        return self.work(x)


def work(block: Own, x: Tensor) -> Tensor:
    return block.work(x)


def layers(how: str, backend: str) -> list[nn.Module]:
    """Two that are compiled in some way and two that are not."""
    torch.manual_seed(0)
    made: list[nn.Module] = [nn.Linear(8, 8), Own(how, backend), Own(how, backend), nn.Linear(8, 8)]
    if how == "module":
        made[1:3] = [torch.compile(m, backend=backend) for m in made[1:3]]
    if how == "in place":
        for module in made[1:3]:
            module.compile(backend=backend)
    return [m.double() for m in made]


def trained(made: list[nn.Module], schedule: str) -> tuple[list[Tensor | None], str]:
    pipe = zbpipe.wrap(
        made, microbatches=MICROBATCHES, schedule=schedule, partition=[2, 2], local_ranks=2,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(20, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    pipe.step(x, target=y)
    pipe.step(x, target=y)
    told = pipe.summary()
    pipe.close()
    return [p.grad for m in made for p in m.parameters()], told


REASONS = {
    "module": "compiled by torch.compile",
    "in place": "compiled by torch.compile",
    "forward": "its forward is compiled by torch.compile",
    "method": "its forward is compiled by torch.compile",
    "function": "is also used outside of the module's own forward, or compiled",
}


@pytest.mark.parametrize("how", REASONS)
def test_what_is_compiled_in_a_pipeline_is_right_and_told_of(backend, how) -> None:
    plain = layers("", backend)
    got, told = trained(layers(how, backend), "zb2p")
    want, all_split = trained(plain, "zb2p")
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, 1e-12)
    same, _ = trained(layers(how, backend), "1f1b")
    assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))
    assert "100.0% of W's FLOPs are deferred" in all_split and "not split" not in all_split
    assert told.count(REASONS[how]) == 2  # a line a stage
    # A Linear of 8 × 8, of which and of the two of 8 × 12 each with its bias.
    deferred = (64 + 8) / (64 + 8 + 2 * 96 + 12 + 8)
    assert told.count(f"{deferred:.1%} of W's FLOPs are deferred") == 2
    assert not counters["graph_break"]
