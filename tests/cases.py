"""Models with every feature that a pipeline has to get right: layers, batches, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SCHEDULES = ("gpipe", "1f1b", "zb1p", "zb2p")
# Two stages a rank: twice as many as there are ranks.
CHUNKED = ("interleaved", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v")
# Both ranks have W's next to each other in the midst of a step: more messages come in after them.
HALVES = """0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2,0F3,0F4,0F5,0I3,0I4,0I5,0W3,0W4,0W5
1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2,1F3,1I3,1F4,1I4,1F5,1I5,1W3,1W4,1W5
"""
WIDTH = 6
Batch = tuple[Any, torch.Tensor]


class Map(nn.Module):
    """A layer without parameters, given as a function."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, value: Any) -> Any:
        return self.fn(value)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Checkpointed(nn.Module):
    """Its inner layers run again in backward; `runs` counts."""

    runs = 0

    def __init__(self, inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        Checkpointed.runs += 1
        return self.inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=self.reentrant)


def block() -> nn.Module:
    inner = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)]
    return Residual(nn.Sequential(*inner))


class Scale(nn.Module):
    """A parameter that no rule knows: its gradient is made in I."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Counted(torch.autograd.Function):
    """x² w, counting how often its backward runs."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, dY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Counted.calls += 1
        x, w = ctx.saved_tensors
        return 2 * dY * x * w, (dY * x * x).flatten(0, -2).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(WIDTH) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Counted.apply(x, self.w)


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.to(target.dtype), target)


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the positions that are not -100."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-100)


def unignored(target: torch.Tensor) -> torch.Tensor:
    return (target != -100).sum()


def regression(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Batch]:
    g = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, generator=g, dtype=dtype), torch.randn(size, generator=g, dtype=dtype))
        for size in sizes
    ]


def tokens(*sizes: tuple[int, int], ignored: bool = False) -> list[Batch]:
    g = torch.Generator().manual_seed(4)
    out = []
    for size in sizes:
        x = torch.randint(0, WIDTH, size, generator=g)
        y = torch.randint(0, WIDTH, size, generator=g)
        if ignored:
            y[torch.rand(size, generator=g) < 0.4] = -100
            y[:2] = -100  # whole samples, so that a microbatch may have no loss at all
            y[-1, -1] = 1
        out.append((x, y))
    return out


@dataclass(frozen=True)
class Case:
    """`layers()` builds the model (any dtype; `dtype` is what it is cast to, None: leave it)."""

    name: str
    layers: Callable[[], list[nn.Module]]
    batches: Callable[[], list[Batch]]
    loss_fn: Callable[..., torch.Tensor] = mse
    loss_weight: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = torch.float64
    tolerance: float = 1e-12
    # Layers of each stage by p; where a p is missing the case does not apply to it.
    partition: dict[int, list[int]] | None = None

    def build(self) -> nn.Sequential:
        """The model, the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model = nn.Sequential(*self.layers())
        return model if self.dtype is None else model.to(self.dtype)

    def fits(self, ranks: int, m: int) -> bool:
        if self.partition is not None and ranks not in self.partition:
            return False
        return all(target.shape[0] >= m for _, target in self.batches())

    def split(self, ranks: int) -> list[int] | str:
        return "auto" if self.partition is None else self.partition[ranks]


def _frozen(*positions: int) -> Callable[[], list[nn.Module]]:
    def layers() -> list[nn.Module]:
        made = [nn.Linear(WIDTH, WIDTH), *(block() for _ in range(3))]
        for i in positions:
            made[i].requires_grad_(False)
        return made

    return layers


def _partly_frozen() -> list[nn.Module]:
    made: list[nn.Module] = [block() for _ in range(4)]
    made[1].inner[1].weight.requires_grad_(False)
    made[2].inner[3].bias.requires_grad_(False)
    return made


def _shared() -> list[nn.Module]:
    a, b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    b.weight = a.weight
    c, d = nn.Linear(WIDTH, WIDTH), Map(lambda x: F.linear(x, c.weight) * 0.5)
    return [a, b, block(), c, d, block(), block(), block()]


def _twice() -> list[nn.Module]:
    once = block()
    return [once, once, block(), block(), block(), block()]


def _several_outputs() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, WIDTH),
        Map(lambda x: (x, x * 2, x.detach(), x.sum(-1))),
        Map(lambda t: (t[0] + t[2], t[1], t[1])),
        block_on_first(),
        Map(lambda t: t[0] + t[1].tanh() + t[2]),
        block(),
    ]


def block_on_first() -> nn.Module:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

        def forward(self, t: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (self.inner(t[0]), *t[1:])

    return First()


def _trees() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, WIDTH),
        Map(lambda x: {"x": x, "n": 3, "none": None, "nest": [x * 2, (1.5, "a")]}),
        Map(lambda d: d | {"x": d["x"] * d["n"] + d["nest"][1][0]}),
        Map(lambda d: (d["x"] + d["nest"][0], d["none"], d["n"])),
        Map(lambda t: t[0] / t[2]),
        block(),
    ]


def _shapes() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, WIDTH),
        Map(lambda x: x.transpose(0, 1)),  # dense, not contiguous
        block(),
        Map(lambda x: x.transpose(0, 1)[:, ::2]),  # with holes
        block(),
        Map(lambda x: x[:, :1].expand(-1, 5, -1)),  # overlapping
        block(),
        Map(lambda x: x.reshape(x.shape[0], -1)[:, : 4 * WIDTH].view(-1, 4, WIDTH)),
    ]


def _sometimes_unused() -> list[nn.Module]:
    def choose(t: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return t[0] if float(t[0].detach().flatten()[0]) > 0 else t[1]

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    return [block(), Pair(), Map(choose), block(), Map(lambda x: x), block()]


def _no_gradient_in_some() -> list[nn.Module]:
    """In some microbatches nothing that a stage received takes part in the loss."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x if float(x.detach().flatten()[0]) > 0 else x.detach()

    return [block(), block(), Map(cut), block(), Map(cut), block()]


def _in_place() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, WIDTH),
        Map(lambda x: x.mul_(1.5).add_(1)),
        nn.ReLU(inplace=True),
        block(),
        Map(lambda x: x.tanh_()),
        nn.Linear(WIDTH, WIDTH),
    ]


def _pass_through() -> list[nn.Module]:
    """Stages that send on the very tensor that they received, and gradients likewise."""
    return [block(), nn.Identity(), nn.Identity(), Map(lambda x: x.view_as(x)), nn.Identity(),
            Residual(nn.Identity()), block()]  # fmt: skip


def _norms() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        Scale(),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.RMSNorm(WIDTH),
    ]


def _mixed() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, WIDTH),
        Map(lambda x: x.bfloat16()),
        Map(lambda x: x.float()),
        nn.Linear(WIDTH, WIDTH),
        Map(lambda x: (x.bfloat16(), x)),
        Map(lambda t: t[0].float() + t[1]),
        nn.Linear(WIDTH, WIDTH),
    ]


def _alternating_dtype() -> list[nn.Module]:
    """The dtype at the boundaries depends on the length of the sequence."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.float() if x.shape[1] % 2 else x

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(self.inner(x.double()))

    return [Cast(), Cast(), Cast(), Cast(), Map(lambda x: x.double())]


def _gpt() -> list[nn.Module]:
    return [nn.Embedding(WIDTH, WIDTH), *(block() for _ in range(4)), nn.Linear(WIDTH, WIDTH)]


def _blocks() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), *(block() for _ in range(4))]


CASES = [
    Case("blocks", _blocks, lambda: regression((9, 4, WIDTH))),
    Case("uneven", _blocks, lambda: regression((11, 4, WIDTH), (10, 4, WIDTH))),
    Case("float32", _blocks, lambda: regression((9, 4, WIDTH), dtype=torch.float32),
         dtype=torch.float32, tolerance=2e-5),
    Case("tokens", _gpt, lambda: tokens((9, 5)), masked),
    Case("ignored", _gpt, lambda: tokens((11, 5), (9, 3), ignored=True), masked, unignored),
    Case("partly_frozen", _partly_frozen, lambda: regression((9, 3, WIDTH))),
    Case("frozen_first", _frozen(0, 1), lambda: regression((9, 3, WIDTH))),
    Case("frozen_middle", _frozen(1, 2), lambda: regression((9, 3, WIDTH))),
    Case("frozen_last", _frozen(3), lambda: regression((9, 3, WIDTH))),
    Case("shared", _shared, lambda: regression((9, 3, WIDTH)),
         partition={1: [8], 2: [3, 5], 4: [2, 1, 3, 2]}),
    Case("twice", _twice, lambda: regression((9, 3, WIDTH)),
         partition={1: [6], 2: [3, 3], 4: [2, 1, 1, 2]}),
    Case("several_outputs", _several_outputs, lambda: regression((9, 3, WIDTH))),
    Case("trees", _trees, lambda: regression((9, 3, WIDTH))),
    Case("shapes", _shapes, lambda: [(x, y[:, :4]) for x, y in regression((9, 8, WIDTH))]),
    Case("sometimes_unused", _sometimes_unused, lambda: regression((9, 3, WIDTH), (9, 3, WIDTH))),
    Case("no_gradient_in_some", _no_gradient_in_some, lambda: regression((9, 3, WIDTH))),
    Case("in_place", _in_place, lambda: regression((9, 3, WIDTH))),
    Case("pass_through", _pass_through, lambda: regression((9, 3, WIDTH))),
    Case("norms", _norms, lambda: regression((18, WIDTH))),
    Case("bf16_boundary", _mixed, lambda: regression((9, 3, WIDTH), dtype=torch.float32),
         dtype=torch.float32, tolerance=2e-5),
    Case("changing", _alternating_dtype,
         lambda: regression((9, 3, WIDTH), (10, 8, WIDTH), (9, 1, WIDTH), (13, 40, WIDTH)),
         tolerance=1e-6),
    Case("accumulate", _blocks, lambda: regression(*[(9, 4, WIDTH)] * 3)),
    Case("checkpointed",
         lambda: [nn.Linear(WIDTH, WIDTH), *(Checkpointed(block(), i % 2 == 1) for i in range(4))],
         lambda: regression((9, 4, WIDTH))),
    Case("custom_function", lambda: [block(), Custom(), block(), Custom()],
         lambda: regression((9, 3, WIDTH))),
]  # fmt: skip
