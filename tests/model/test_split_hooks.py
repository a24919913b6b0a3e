"""Post-accumulate-grad hooks: muted while microbatches run, fired once after the last W."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zbpipe.model.split import Deferred, Splitter, fire_hooks, mute_hooks


def test_post_accumulate_hooks_fire_once_after_the_last_w() -> None:
    stage, fired = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)), []
    for name, p in stage.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, p.grad + 0)))
    idle = nn.Parameter(torch.ones(1))
    idle.grad = torch.ones(1)  # left from an earlier step
    idle.register_post_accumulate_grad_hook(lambda p: fired.append(("idle", p.grad)))
    parameters = [*stage.parameters(), idle]
    splitter, touched = Splitter(stage), set()
    for fused in (True, False, False):
        entry = Deferred(fused, touched)
        with splitter.active(entry), mute_hooks([*parameters, idle], touched):
            stage(torch.randn(2, 6)).sum().backward()
        entry.run()
    assert not fired
    fire_hooks(p for p in parameters if p in touched)
    assert [name for name, _ in fired] == [name for name, _ in stage.named_parameters()]
    for (name, grad), p in zip(fired, stage.parameters(), strict=True):
        assert torch.equal(grad, p.grad), name
    stage(torch.randn(2, 6)).sum().backward()
    assert len(fired) == 2 * len(list(stage.parameters()))  # ordinary again


def test_hooks_are_restored_in_order_after_an_exception() -> None:
    p, fired = nn.Parameter(torch.ones(2)), []
    handle = p.register_post_accumulate_grad_hook(lambda p: fired.append("first"))
    p.register_post_accumulate_grad_hook(lambda p: fired.append("second"))
    with pytest.raises(KeyError), mute_hooks([p]):
        p.sum().backward()
        p.register_post_accumulate_grad_hook(lambda p: fired.append("late"))
        raise KeyError
    assert not fired
    p.sum().backward()
    assert fired == ["first", "second", "late"]
    handle.remove()
    fire_hooks([p])
    assert fired[3:] == ["second", "late"]
    p.grad = None
    fire_hooks([p])
    assert len(fired) == 5
