"""Every launcher names the argument that does not fit; test_kernels.py runs this file."""

from __future__ import annotations

import pytest
import torch
from drawing import draw

from zbpipe.errors import ConfigError
from zbpipe.kernels import (
    bias_grad,
    dgrad,
    embedding_grad,
    expert_wgrad,
    norm_dgrad,
    norm_wgrad,
    wgrad,
)

X, Y, G = draw(2, 6, 4), draw(2, 6, 3), draw(3, 4)
MISUSE = {
    "dY is torch.float64": lambda: dgrad.dgrad(Y[0].double(), G.double()),
    r"W has shape \(4, 3\): must be \(3, any\)": lambda: dgrad.dgrad(Y[0], G.t().contiguous()),
    "W is torch.float16 and dY is torch.float32": lambda: dgrad.dgrad(Y[0], G.half()),
    "W has strides": lambda: dgrad.dgrad(Y[0], draw(3, 8)[:, ::2]),
    "dY has strides": lambda: dgrad.dgrad(draw(3, 6).t(), G),
    r"out has shape \(6, 5\)": lambda: dgrad.dgrad(Y[0], G, out=draw(6, 5)),
    "out is torch.float16": lambda: dgrad.dgrad(Y[0], G, out=draw(6, 4).half()),
    "dW is torch.bfloat16: a main gradient": lambda: wgrad.wgrad(G.bfloat16(), Y[0], X[0]),
    r"dY has shape \(6, 3\): must be \(any, 4\)": lambda: wgrad.wgrad(draw(4, 3), Y[0], X[0]),
    r"X has shape \(5, 4\)": lambda: wgrad.wgrad(G, Y[0], draw(5, 4)),
    r"X\[1\] has shape \(5, 4\)": lambda: wgrad.wgrad(G, list(Y), [X[0], draw(5, 4)]),
    "X is torch.float16 and dY": lambda: wgrad.wgrad(G, Y[0], X[0].half()),
    r"dY\[1\] is torch.float16 and dY\[0\] is": lambda: wgrad.wgrad(
        G, [Y[0], Y[1].half()], [X[0], X[1].half()]
    ),
    "X has 1 microbatches and dY has 2": lambda: wgrad.wgrad(G, list(Y), [X[0]]),
    r"dY has shape \(2, 6, 3\)": lambda: wgrad.wgrad(G, Y, X),
    r"db has shape \(4,\)": lambda: bias_grad.bias_grad(draw(4), Y[0]),
    r"dY has shape \(2, 6, 3\): must be \(any, any\)": lambda: bias_grad.bias_grad(draw(3), Y),
    "rstd is torch.float16": lambda: norm_dgrad.norm_dgrad(X[0], X[1], X[0, 0], draw(6).half()),
    r"mean has shape \(5,\)": lambda: norm_wgrad.norm_wgrad(
        draw(4), None, X[0], X[1], draw(6), draw(5)
    ),
    "at most 16384": lambda: norm_dgrad.norm_dgrad(
        draw(1, 16385), draw(1, 16385), draw(16385), draw(1)
    ),
    "offsets is torch.int64": lambda: expert_wgrad.expert_wgrad(
        draw(2, 3, 4), Y[0], X[0], torch.tensor([3, 6])
    ),
    r"offsets has shape \(3,\)": lambda: expert_wgrad.expert_wgrad(
        draw(2, 3, 4), Y[0], X[0], torch.tensor([3, 6, 6]).int()
    ),
    r"dW has shape \(2, 4, 3\)": lambda: expert_wgrad.expert_wgrad(
        draw(2, 4, 3), Y[0], X[0], torch.tensor([3, 6]).int()
    ),
    "indices is torch.int32": lambda: embedding_grad.embedding_grad(
        draw(9, 3), Y[0], torch.zeros(6, dtype=torch.int32)
    ),
    r"dW has shape \(9, 4\)": lambda: embedding_grad.embedding_grad(
        draw(9, 4), Y[0], torch.zeros(6, dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse_names_the_argument(message) -> None:
    with pytest.raises(ConfigError, match=message):
        MISUSE[message]()
