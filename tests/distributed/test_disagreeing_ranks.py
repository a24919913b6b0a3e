"""Ranks that are told different things, or fail where the others wait: an error on each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbpipe
from crews import forked
from zbpipe import ConfigError


def _job(world, store: str, act: Callable[[int, Path], None], folder: str) -> str:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    try:
        torch.set_num_threads(1)
        act(world.rank, Path(folder))
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def messages(act: Callable[[int, Path], None], tmp_path) -> list[str]:
    outcomes = forked(_job, 2, str(tmp_path / "store"), act, str(tmp_path))
    assert all(o.error is None for o in outcomes), [(o.rank, o.trace) for o in outcomes]
    return [o.get() for o in outcomes]


def layers() -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Linear(4, 4), nn.Linear(4, 4)]


def _example(rank: int, folder: Path) -> None:
    example = torch.randn(4, 4) if rank == 0 else None
    zbpipe.wrap(layers(), microbatches=2, schedule="1f1b", example=example)


def _meta(rank: int, folder: Path) -> None:
    with torch.device("meta" if rank else "cpu"):
        model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    zbpipe.wrap(model, microbatches=2, schedule="1f1b", example=torch.randn(4, 4))


@pytest.mark.parametrize("act", [_example, _meta])
def test_an_example_or_numbers_on_one_rank_only(act, tmp_path) -> None:
    for message in messages(act, tmp_path):
        assert "rank 1 differs from rank 0 in whether there is an example" in message


def _argument(rank: int, folder: Path) -> None:
    loss = nn.functional.mse_loss
    pipe = zbpipe.wrap(layers(), microbatches=2, schedule="1f1b", loss_fn=loss, timeout=20)
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    if folder.joinpath("later").exists():
        pipe.step(x, target=y)
    pipe.step(x, target=y, **({"typo": 1} if rank else {}))


@pytest.mark.parametrize("later", [False, True])
def test_a_wrong_argument_on_one_rank(later, tmp_path) -> None:
    if later:
        (tmp_path / "later").touch()
    for message in messages(_argument, tmp_path):
        assert "step() got 'typo'" in message


def _save(rank: int, folder: Path) -> None:
    pipe = zbpipe.wrap(layers(), microbatches=2, schedule="1f1b")

    class Refuses:
        class config:  # noqa: N801
            @staticmethod
            def save_pretrained(directory):
                raise ValueError("this configuration is not valid")

    pipe._whole = Refuses
    pipe.save(folder / "model")


def test_a_configuration_that_cannot_be_written(tmp_path) -> None:
    for message in messages(_save, tmp_path):
        assert "this configuration is not valid" in message
