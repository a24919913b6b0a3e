"""A transport is given to pairs of ranks that exchange messages, and to no others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hosting import everyone, on_hosts
from torch import nn

import zbpipe
from cases import WIDTH, mse, regression
from families import batch, build
from zbpipe import ConfigError

((X, Y),) = regression((8, WIDTH))


class _Untouched(nn.Linear):
    """A layer that is not to be run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("something was computed")


def _wraps(rank: int, schedule: str, transports: Any) -> None:
    layers = [_Untouched(WIDTH, WIDTH).double() for _ in range(8)]
    transport = transports[rank % len(transports)]
    zbpipe.wrap(layers, 4, schedule, loss_fn=mse, transport=transport)


CHAIN = "(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)"


@pytest.mark.parametrize(
    ("hosts", "schedule", "transports", "pair", "there"),
    [
        ("aaaa", "zb1p", [{(0, 3): "tcp"}], (0, 3), CHAIN),
        ("abab", "1f1b", [{(1, 0): "tcp", (3, 1): "tcp", (2, 1): "tcp"}], (3, 1), CHAIN),
        ("aaa", "zb_v", [{(0, 2): "tcp"}], (0, 2), "(0, 1), (1, 0), (1, 2), (2, 1)"),
        # Where only one rank says so, and where two say what is the same in a pair of ranks.
        ("aaaa", "auto", [None, None, {(3, 0): "tcp"}, None], (3, 0), CHAIN),
        ("aaa", "zb1p", ["tcp", {(a, b): "tcp" for a in range(3) for b in range(3) if a != b}],
         (0, 2), "(0, 1), (1, 0), (1, 2), (2, 1)"),
    ],
)  # fmt: skip
def test_a_pair_without_a_channel_is_an_error_on_every_rank(
    tmp_path, hosts, schedule, transports, pair, there
) -> None:
    source, target = pair
    for outcome in on_hosts(tmp_path, _wraps, hosts, schedule, transports):
        assert type(outcome.error) is ConfigError, outcome.trace
        said = str(outcome.error)
        assert said.startswith(f"transport = {{{pair}: 'tcp'}}: rank {source} sends nothing to ")
        assert said.endswith(f"to rank {target}; want pairs (from, to) of {there}")


def _trains(rank: int, model: str, schedule: str, pair: tuple[int, int]) -> tuple[Any, Any, str]:
    """Pairs that the error lists where `pair` is wrong, those of the channels, and `pair`'s."""
    options: dict[str, Any] = {"microbatches": 3, "schedule": schedule}
    inputs: Any = batch()
    if model == "layers":
        options["loss_fn"] = mse

    def wrapped(transport: Any) -> zbpipe.Pipeline:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(6)]
        return zbpipe.wrap(layers if model == "layers" else build(model), **options, **transport)

    listed = None
    if model == "layers" and schedule == "1f1b":
        with pytest.raises(ConfigError) as raised:
            wrapped({"transport": {pair[::-1]: "tcp", (0, 2): "tcp"}})
        listed = {*re.findall(r"\(\d, \d\)", str(raised.value).partition("to) of ")[2])}
    pipe = wrapped({"transport": {pair: "tcp"}})
    if model == "layers":
        pipe.step(X, target=Y)
    else:
        pipe.step(**inputs)
    assert pipe._crew is not None
    channels = {*map(str, pipe._crew._slots)}
    found = pipe._crew._transport(pair)
    pipe.close()
    return listed, channels, found


@pytest.mark.parametrize(
    ("model", "schedule", "pair"),
    [
        ("layers", "1f1b", (1, 2)),
        ("layers", "interleaved", (2, 0)),  # from the last rank's chunk to the first's next
        # The shared matrix's gradient.
        pytest.param("llama-tied", "zb_h1", (0, 2), marks=pytest.mark.slow),
    ],
)
def test_every_pair_with_a_channel_may_have_a_transport(tmp_path, model, schedule, pair) -> None:
    for listed, channels, found in everyone(
        on_hosts(tmp_path, _trains, "aaa", model, schedule, pair)
    ):
        assert found == "tcp"
        assert str(pair) in channels
        # Of three ranks all exchange messages under the others.
        assert listed == (channels if schedule == "1f1b" else None)
        assert (len(channels) == 6) == (schedule != "1f1b")
