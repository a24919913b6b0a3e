"""A stage's split: what is deferred, what is not, and that the stage stays what it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from splitting import assert_close, assert_same_training, gradients, run_plain, run_split
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from zbpipe.errors import ZbpipeError
from zbpipe.model.split import Deferred, Splitter


class Block(nn.Module):
    """A pre-norm MLP block that counts its runs; `reentrant` None: not checkpointed."""

    def __init__(self, width: int = 6, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.reentrant, self.runs = reentrant, 0

    def body(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Tied(nn.Module):
    """An embedding whose table is also the head's weight, and two Linears that share another."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embed, self.functional = nn.Embedding(9, 6), functional
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.b(self.a(self.embed(indices)).tanh())
        if self.functional:
            x = x + nn.functional.linear(x, self.a.weight)
        return self.head(x)


def double(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def microbatches(count: int = 3, *shape: int) -> list[Tensor]:
    return [double(*(shape or (2, 5, 6))).add(i).requires_grad_() for i in range(count)]


def kept_in_i(splitter: Splitter) -> dict[str, str]:
    return dict(splitter.report().not_split)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("delay", [0, 2])
def test_a_stage_matches_autograd(reentrant, delay) -> None:
    stage = nn.Sequential(Block(reentrant=reentrant), Block(reentrant=reentrant)).double()
    assert_same_training(stage, microbatches(), microbatches(), delay=delay)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_checkpointed_layers_are_recomputed_once_and_recorded_once(reentrant, fused) -> None:
    stage = nn.Sequential(Block(reentrant=reentrant), Block(reentrant=reentrant))
    x, entry, splitter = torch.randn(2, 6, requires_grad=True), Deferred(fused), Splitter(stage)
    with splitter.active(entry):
        y = stage(x)
    with splitter.active(entry):
        y.sum().backward()
    assert [block.runs for block in stage] == [2, 2]
    assert len(entry) == (0 if fused else 4)
    entry.run()
    assert len(entry) == 0 and all(p.grad is not None for p in stage.parameters())


def test_a_custom_function_runs_its_backward_once() -> None:
    calls = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, dY):
            calls.append(1)
            x, weight = ctx.saved_tensors
            return dY * weight, (dY * x).flatten(0, -2).sum(0)

    class Custom(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((6,), 0.5))

        def body(self, x: Tensor) -> Tensor:
            return super().body(Scale.apply(x, self.scale))

    stage = Custom().double()
    run_split(stage, microbatches(3), microbatches(3), fused=False, delay=1)
    assert len(calls) == 3
    assert_same_training(stage, microbatches(), microbatches())


@pytest.mark.parametrize("functional", [False, True])
def test_tied_parameters_are_summed_once(functional) -> None:
    stage = Tied(functional).double()
    x = [torch.tensor([[1, 2, 3], [8, 1, 1]]), torch.tensor([[0, 2, 0], [5, 5, 1]])]
    dYs = [double(2, 3, 9), double(2, 3, 9) * 2]
    assert_same_training(stage, x, dYs, bitwise=not functional)
    assert not kept_in_i(Splitter(stage))


def halve(module: nn.Module) -> tuple[nn.Module, dict[str, str | None]]:
    """Put a hook on a's bias: a leaves, so its weight does, so b does."""
    module.a.bias.register_hook(lambda grad: grad / 2)
    return module, {"a": "bias has gradient hooks", "b": "shares a parameter with a"}


def parametrize_head(module: nn.Module) -> tuple[nn.Module, dict[str, str | None]]:
    parametrize.register_parametrization(module.head, "weight", nn.Identity())
    reason = "shares a parameter with head.parametrizations.weight"
    return module, {"embed": reason, "head.parametrizations.weight": None}


def exclude(module: nn.Module) -> tuple[nn.Module, dict[str, str | None]]:
    return module, {"a": "weight is excluded", "b": "weight is excluded"}


@pytest.mark.parametrize("prepare", [halve, parametrize_head, exclude])
def test_a_parameter_left_to_autograd_is_left_everywhere(prepare) -> None:
    stage, reasons = prepare(Tied(functional=False).double())
    plain, _ = prepare(Tied(functional=False).double())
    plain.load_state_dict(stage.state_dict())
    splitter = Splitter(stage, [stage.a.weight] if prepare is exclude else [])
    left = kept_in_i(splitter)
    assert set(left) == set(reasons)
    assert all(left[name] == reason for name, reason in reasons.items() if reason)
    entry = Deferred()
    with splitter.active(entry):
        stage(torch.tensor([[1, 2]])).sum().backward()
    due = {id(p) for p in entry.parameters()}
    for name in left:
        own = stage.get_submodule(name).parameters(recurse=False)
        assert not due & {id(p) for p in own}, name
    stage.zero_grad()
    x, dYs = [torch.tensor([[1, 2, 3]])], [double(1, 3, 9)]
    run_plain(plain, x, dYs)
    run_split(stage, x, dYs, fused=False, splitter=splitter)
    for (name, got), want in zip(gradients(stage).items(), gradients(plain).values(), strict=True):
        assert_close(got, want, 1e-12, name)


def test_hooks_patches_and_new_parameters_are_noticed_when_they_come_and_go() -> None:
    stage = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    splitter, x = Splitter(stage), torch.randn(2, 6)

    def deferred() -> int:
        entry = Deferred()
        with splitter.active(entry):
            stage(x).sum().backward()
        return len(entry)

    assert deferred() == 2
    seen = []
    handle = stage[0].bias.register_hook(seen.append)
    assert deferred() == 1 and len(seen) == 1
    handle.remove()
    assert deferred() == 2 and len(seen) == 1
    stage[1].forward = lambda x: nn.functional.linear(x, stage[1].weight)
    assert deferred() == 1
    del stage[1].forward
    assert deferred() == 2
    stage[0].weight = nn.Parameter(torch.randn(6, 6))
    assert deferred() == 2
    stage[0].weight = stage[1].weight
    assert deferred() == 2
    stage[0].weight.register_hook(seen.append)
    assert deferred() == 0
    parametrize.register_parametrization(stage[0], "bias", nn.Identity())
    assert "no rule" not in kept_in_i(splitter)["0"]


def test_a_stage_on_meta_may_be_materialised_later() -> None:
    with torch.device("meta"):
        stage = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    splitter = Splitter(stage)
    assert splitter.report().deferred_share == 1
    stage.load_state_dict(
        {name: torch.ones(p.shape) for name, p in stage.named_parameters()}, assign=True
    )
    entry = Deferred()
    with splitter.active(entry):
        stage(torch.randn(2, 6)).sum().backward()
    assert len(entry) == 2
    entry.run()
    assert stage[0].weight.grad is not None


class Quiet(nn.Linear):
    """A subclass that does not override forward."""


class Loud(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.abs().t() + self.bias


def test_which_modules_have_a_rule() -> None:
    stage = nn.ModuleDict(
        {
            "quiet": Quiet(2, 2),
            "loud": Loud(2, 2),
            "norm": nn.LayerNorm(2),
            "conv": nn.Conv1d(2, 2, 1),
            "sparse": nn.Embedding(2, 2, sparse=True),
            "max_norm": nn.Embedding(2, 2, max_norm=1.0),
            "scaled": nn.Embedding(2, 2, scale_grad_by_freq=True),
            "attention": nn.MultiheadAttention(2, 1),
            "complex": nn.Linear(2, 2, dtype=torch.complex64),
            "frozen": Loud(2, 2).requires_grad_(False),
            "normed": parametrizations.weight_norm(nn.Linear(2, 2)),
            "compiled": torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"),
        }
    )
    left = kept_in_i(Splitter(stage))
    assert left.pop("loud").startswith("no rule for Loud: a forward of its own")
    assert "by choice" in left.pop("norm")
    assert left.pop("sparse") == "sparse is set"
    assert left.pop("max_norm") == "max_norm is set"
    assert left.pop("scaled") == "scale_grad_by_freq is set"
    assert "MultiheadAttention" in left.pop("attention")
    assert "MultiheadAttention" in left.pop("attention.out_proj")
    assert left.pop("complex") == "weight is torch.complex64"
    assert "parametrized" in left.pop("normed")
    assert "parametrized" in left.pop("normed.parametrizations.weight")
    assert left.pop("compiled._orig_mod.0") == "compiled by torch.compile"
    assert not left


def test_the_report_counts_what_w_computes() -> None:
    stage = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), Loud(6, 6), nn.LayerNorm(6))
    report = Splitter(stage).report()
    assert report.deferred_flops == 2 * 42
    assert report.total_flops == 2 * (42 + 42 + 12)
    assert report.deferred_share == 42 / 96
    stage[2].requires_grad_(False)
    assert Splitter(stage).report().deferred_share == 42 / 54
    assert Splitter(nn.Sequential()).report().deferred_share == 0


def test_a_compiled_stage_is_right_and_left_alone() -> None:
    stage = nn.Sequential(nn.Linear(6, 6), nn.GELU()).double()
    compiled = nn.Sequential(torch.compile(copy.deepcopy(stage), backend="eager"))
    run_plain(stage, microbatches(), microbatches())
    run_split(compiled, microbatches(), microbatches(), fused=False)
    for got, want in zip(compiled.parameters(), stage.parameters(), strict=True):
        assert_close(got.grad, want.grad, 1e-12)


def test_outside_the_context_the_stage_is_ordinary() -> None:
    stage = Block()
    before = {name: dict(m.__dict__) for name, m in stage.named_modules()}
    splitter = Splitter(stage)
    with splitter.active(Deferred()):
        assert "forward" in stage.up.__dict__
    assert {name: dict(m.__dict__) for name, m in stage.named_modules()} == before
    twin = pickle.loads(pickle.dumps(copy.deepcopy(stage)))
    x = torch.randn(2, 6)
    assert torch.equal(twin(x), stage(x))
    twin(x).sum().backward()
    assert stage.up.weight.grad is None and twin.up.weight.grad is not None


def test_exceptions_restore_the_stage() -> None:
    stage = Block()
    splitter = Splitter(stage)
    with pytest.raises(RuntimeError, match=r"shape|size"), splitter.active(Deferred()):
        stage(torch.randn(2, 7))
    assert all("forward" not in m.__dict__ for m in stage.modules())
    entry = Deferred()
    with splitter.active(entry):
        stage(torch.randn(2, 6)).sum().backward()
    assert len(entry) == 2


def test_two_microbatches_at_once_are_an_error() -> None:
    splitter = Splitter(Block())
    with splitter.active(Deferred()), pytest.raises(ZbpipeError, match="entered twice"):
        splitter.active(Deferred()).__enter__()
    with splitter.active(Deferred()):
        pass


def test_a_forward_replaced_inside_the_context_is_kept() -> None:
    stage = nn.Sequential(nn.Linear(6, 6))
    with Splitter(stage).active(Deferred()):
        stage[0].forward = abs
    assert stage[0].forward is abs


def test_interleaved_microbatches_keep_their_entries_apart() -> None:
    """Two stages' worth of F before the first I, as 1F1B runs them: each W gets its own X, dY."""
    stage = nn.Linear(6, 6)
    splitter, entries, outputs = Splitter(stage), [Deferred(), Deferred()], []
    xs = [torch.randn(2, 6), torch.randn(2, 6)]
    for x, entry in zip(xs, entries, strict=True):
        with splitter.active(entry):
            outputs.append(stage(x))
    for y, entry in zip(outputs, entries, strict=True):
        with splitter.active(entry):
            y.backward(torch.ones(2, 6))
    for x, entry in zip(xs, entries, strict=True):
        stage.zero_grad()
        entry.run()
        assert_close(stage.weight.grad, torch.ones(6, 2) @ x, 1e-6)


def test_module_hooks_still_run() -> None:
    stage, seen = nn.Sequential(nn.Linear(6, 6)), []
    stage[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    stage[0].register_forward_hook(lambda m, args, y: y + 1)
    stage[0].register_full_backward_hook(lambda m, dX, dY: seen.append((dX[0], dY[0])))
    x = torch.randn(2, 6, requires_grad=True)
    with Splitter(stage).active(Deferred()):
        y = stage(x)
        y.backward(torch.ones(2, 6))
    assert_close(y, 2 * x @ stage[0].weight.t() + stage[0].bias + 1, 1e-6)
    assert len(seen) == 1 and torch.equal(x.grad, 2 * seen[0][0])


def test_the_entry_counts_its_live_storages_and_lets_them_go() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    stage, entry, x = Pair(), Deferred(), torch.randn(8, 6)
    with Splitter(stage).active(entry):
        stage(x).backward(torch.randn(8, 6))
    # One X and one dY, each used by both layers: two storages of 8 × 6 fp32.
    assert sorted(s.nbytes() for s in entry.storages()) == [192, 192]
    assert x.untyped_storage()._cdata in {s._cdata for s in entry.storages()}
    entry.run()
    assert not list(entry.storages()) and not list(entry.parameters())


def test_records_do_not_keep_the_graph_alive() -> None:
    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, token):
            ctx.token = token
            return x * 1

        @staticmethod
        def backward(ctx, dY):
            return dY, None

    class Token:
        gone = False

        def __del__(self) -> None:
            Token.gone = True

    stage, entry = nn.Linear(6, 6), Deferred()
    with Splitter(stage).active(entry):
        y = stage(Witness.apply(torch.randn(2, 6, requires_grad=True), Token()))
        y.sum().backward()
    del y
    assert Token.gone and len(entry) == 1
