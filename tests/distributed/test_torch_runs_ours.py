"""Our searched orders in torch's own schedule runtime: it runs them, with our gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import zbpipe
from crews import forked
from zbpipe.costs import Costs
from zbpipe.schedule.search import search
from zbpipe.schedule.solve import solve

WIDTH, MICROBATCHES = 8, 6


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(4)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    shape = (2 * MICROBATCHES, WIDTH)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def _by_torch(world: object, path: str, csv: str, held: tuple[tuple[int, ...], ...]) -> dict:
    """The gradients of this rank's layers after one step of torch's runtime on `csv`."""
    rank = world.rank
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        model, (x, y) = layers(), batch()
        stages = sum(map(len, held))
        share = len(model) // stages
        modules = {s: nn.Sequential(*model[s * share : (s + 1) * share]) for s in held[rank]}
        runtime = _PipelineScheduleRuntime(
            [PipelineStage(m, s, stages, torch.device("cpu")) for s, m in modules.items()],
            MICROBATCHES,
            loss_fn=mse,
        )
        runtime._load_csv(csv, format="compute_only")
        runtime.step(*([x] if 0 in modules else []), target=y, losses=[])
        return {
            f"{s * share + layer}.{name}": parameter.grad.tolist()
            for s, module in modules.items()
            for layer, part in enumerate(module)
            for name, parameter in part.named_parameters()
        }
    finally:
        dist.destroy_process_group()


def by_zbpipe(schedule: zbpipe.Schedule) -> dict:
    pipe = zbpipe.wrap(
        layers(),
        microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=mse,
        local_ranks=2,
    )
    x, y = batch()
    pipe.step(x, target=y)
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


def close(theirs: list, ours: torch.Tensor) -> None:
    got = torch.tensor(theirs, dtype=torch.float64)
    torch.testing.assert_close(got, ours, rtol=1e-12, atol=1e-14)


def test_torch_runs_our_zb1p_with_our_gradients(tmp_path: Path) -> None:
    costs = Costs.uniform(2, 1.0, 1.2, 0.7, 0.1)
    schedule = solve("zb1p", costs, MICROBATCHES).schedule
    assert {action.kind for row in schedule.rows for action in row} == set("FIW")
    csv = tmp_path / "zb1p.csv"
    csv.write_text(schedule.to_csv())
    outcomes = forked(_by_torch, 2, str(tmp_path / "store"), str(csv), ((0,), (1,)))
    theirs = outcomes[0].get() | outcomes[1].get()
    ours = by_zbpipe(schedule)
    assert theirs.keys() == ours.keys()
    for name, gradient in ours.items():
        assert gradient.abs().max() > 0
        close(theirs[name], gradient)


@pytest.mark.parametrize("budget", [1.0, 1.5, 3.0])
def test_torch_runs_our_v_orders_with_the_unsplit_gradients(tmp_path: Path, budget: float) -> None:
    costs = Costs.uniform(4, 1.0, 1.2, 0.7, 0.1, act=0.5, stash=0.25)
    schedule = search(costs, (0, 1, 1, 0), MICROBATCHES, budget, time_limit=0.2)
    csv = tmp_path / "v.csv"
    csv.write_text(schedule.to_csv())
    outcomes = forked(_by_torch, 2, str(tmp_path / "store"), str(csv), ((0, 3), (1, 2)))
    theirs = outcomes[0].get() | outcomes[1].get()
    model, (x, y) = nn.Sequential(*layers()), batch()
    mse(model(x), y).backward()
    for name, parameter in model.named_parameters():
        close(theirs[name], parameter.grad)
