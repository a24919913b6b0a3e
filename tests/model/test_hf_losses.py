"""The model's own loss, of every kind: weighed as the unsplit model weighs it, or refused."""

from __future__ import annotations

import os

import pytest
import torch
import transformers as hf

import zbpipe
from families import BASE, batch, build
from zbpipe import ConfigError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def made(kind: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(hf, kind)(
            hf.LlamaConfig(**BASE, num_labels=3, classifier_dropout=0.0)
        ).double()


def compare(model, want, inputs, **options) -> None:
    pipe = zbpipe.wrap(model, schedule="zb1p", local_ranks=2, **options)
    expected = want(**inputs, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(pipe.step(**inputs), expected.detach(), rtol=1e-5, atol=1e-6)
    grads = {name: p.grad for name, p in want.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("kind", ["LlamaForTokenClassification", "LlamaForSequenceClassification"])
def test_losses_that_do_not_shift(kind, count) -> None:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 61, (5, 8), generator=g)
    labels = torch.randint(0, 3, (5, 8) if "Token" in kind else (5,), generator=g)
    if "Token" in kind:
        labels[1, :6] = -100
    compare(made(kind), made(kind), {"input_ids": ids, "labels": labels}, microbatches=count)


def test_num_items_in_batch_is_a_sum() -> None:
    inputs = batch()
    inputs["num_items_in_batch"] = 35
    compare(build("llama"), build("llama"), inputs, microbatches=3)


def test_labels_that_are_shifted_already() -> None:
    inputs = batch()
    shifted = torch.full_like(inputs["labels"], -100)
    shifted[:, :-1] = inputs["labels"][:, 1:]
    inputs["shift_labels"] = shifted
    compare(build("llama"), build("llama"), inputs, microbatches=3)


def test_a_loss_of_which_nothing_is_known_is_refused() -> None:
    model = build("llama")
    model.loss_type = "ForQuestionAnswering"
    pipe = zbpipe.wrap(model, microbatches=3, schedule="1f1b", local_ranks=2)
    with pytest.raises(ConfigError, match=r"ForQuestionAnswering.*loss_weight"):
        pipe.step(**batch())


def test_arguments_that_the_model_takes_and_a_pipeline_sets_itself() -> None:
    inputs = batch(padded=False)
    want = build("llama")
    expected = want(**inputs).loss.detach()
    pipe = zbpipe.wrap(build("llama"), microbatches=3, schedule="1f1b", local_ranks=2)
    positions = torch.arange(12)[None]  # the same for all: its dim 0 is not the batch
    for extra in ({"use_cache": True}, {"return_dict": False}, {"position_ids": positions}):
        loss = pipe.step(**(extra | inputs))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="pass labels"):
        pipe.step(input_ids=inputs["input_ids"], labels=None)


def test_hooks_on_layers_see_their_own_stage_only() -> None:
    model, calls = build("llama"), []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
        layer.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    pipe = zbpipe.wrap(model, microbatches=3, schedule="1f1b", local_ranks=2)
    pipe.step(**batch())
    assert sorted(calls) == sorted([0, 1, 2, 3] * 6)
