"""Every Hugging Face family through the split: the whole model, and how much of W is deferred."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import assert_close, gradients
from torch import nn

import families
from zbpipe.model.graph import used_directly
from zbpipe.model.split import Deferred, Splitter

# fp32 models: the largest noise seen was 2e-6 of a tensor's maximum.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def losses(model: nn.Module, splitter: Splitter | None, fused: bool = False) -> list[float]:
    """Two microbatches, W of the first after I of the second."""
    seen, entries = [], []
    for start in (0, 3):
        batch = {name: t[start : start + 3] for name, t in families.batch().items()}
        if splitter is None:
            loss = model(**batch).loss
            loss.backward()
        else:
            entry = Deferred(fused)
            entries.append(entry)
            with splitter.active(entry):
                loss = model(**batch).loss
            if start == 0:
                eager = used_directly([loss])
            entry.eager = eager
            with splitter.active(entry):
                loss.backward()
        seen.append(loss.item())
    for entry in entries:
        entry.run()
    return seen


WAYS = [(name, "eager") for name in families.FAMILIES]
WAYS += [(name, "grouped_mm") for name in families.EXPERTS]


@pytest.mark.parametrize(("name", "experts"), WAYS)
def test_a_family_trains_as_ever(name, experts) -> None:
    model = families.build(name).train()
    model.config._experts_implementation = experts
    plain, fused, split = (copy.deepcopy(model) for _ in range(3))
    want = losses(plain, None)
    assert losses(fused, Splitter(fused), fused=True) == losses(split, Splitter(split)) == want
    tolerance = TOLERANCE[next(model.parameters()).dtype]
    together = zip(*(gradients(m).items() for m in (plain, fused, split)), strict=True)
    for (name, p), (_, b), (_, iw) in together:
        assert_close(iw, p, tolerance, name)
        assert (b is None) == (iw is None)
        assert b is None or torch.equal(b, iw), f"{name}: B and I + W differ"


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_experts_are_recorded_once(experts, reentrant) -> None:
    model = families.build("mixtral").train()
    model.config._experts_implementation = experts
    plain, split = copy.deepcopy(model), copy.deepcopy(model)
    split.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert losses(split, Splitter(split)) == losses(plain, None)
    for (name, p), (_, iw) in zip(gradients(plain).items(), gradients(split).items(), strict=True):
        assert_close(iw, p, TOLERANCE[torch.float32], name)


@pytest.mark.parametrize(("name", "experts"), WAYS)
def test_nearly_all_of_a_family_is_deferred(name, experts) -> None:
    model = families.build(name)
    model.config._experts_implementation = experts
    splitter = Splitter(model)
    report = splitter.report()
    assert report.deferred_share > 0.95
    # gpt-oss's attention holds its sinks itself.
    others = [name for name, reason in report.not_split if "by choice" not in reason]
    assert all(n.endswith("self_attn") and name == "gpt-oss" for n in others), report.not_split
    # What the report says is what happens: nothing else is left to autograd.
    entry = Deferred()
    with splitter.active(entry):
        loss = model(**families.batch()).loss
        left = used_directly([loss])
    kept = {id(p) for n, _ in report.not_split for p in model.get_submodule(n).parameters()}
    assert {n for n, p in model.named_parameters() if p in left and id(p) not in kept} == set()


def test_a_way_to_run_experts_without_a_rule_is_named() -> None:
    model = families.build("mixtral")
    model.config._experts_implementation = "batched_mm"
    left = dict(Splitter(model).report().not_split)
    assert "batched_mm" in left["model.layers.0.mlp.experts"]


def test_experts_count_what_a_token_uses() -> None:
    model = families.build("mixtral")
    experts = model.model.layers[0].mlp.experts
    report = Splitter(experts).report()
    assert report.deferred_share == 1
    assert report.total_flops == 2 * sum(p.numel() for p in experts.parameters()) * 2 / 4
