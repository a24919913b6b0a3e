"""Hugging Face models as they are: equal to the unsplit model, for every family."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbpipe
from crews import forked
from families import EAGER_ONLY, EXPERTS, FAMILIES, batch, build, table
from zbpipe import ConfigError
from zbpipe.model.hf import take_apart

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Sums in another order; fp64, fp32, and loss_function's upcast of logits to fp32.
TOLERANCE = 2e-5


def unsplit(name: str, inputs: dict[str, torch.Tensor], attention: str = "eager", steps: int = 1):
    model = build(name, attention)
    for _ in range(steps):
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
    return model, loss.detach()


def assert_same(named, want: nn.Module) -> int:
    """Compare the gradients that are there; some are 0 but for rounding (a key's bias)."""
    expected = dict(want.named_parameters(remove_duplicate=False))
    scale = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    compared = 0
    for key, parameter in named:
        reference = expected[key].grad
        assert (parameter.grad is None) == (reference is None), key
        if reference is not None:
            error = float((parameter.grad - reference).abs().max())
            assert error <= TOLERANCE * max(float(reference.abs().max()), 1e-3 * scale), key
            compared += 1
    return compared


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "zb2p"), (4, "1f1b"), (2, "zb_v")])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_unsplit_model(name, ranks, schedule) -> None:
    inputs = batch()
    want, expected = unsplit(name, inputs)
    model = build(name)
    pipe = zbpipe.wrap(model, microbatches=3, schedule=schedule, local_ranks=ranks)
    loss = pipe.step(**inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert assert_same(model.named_parameters(), want) > 10
    torch.testing.assert_close(pipe.eval_step(**inputs), expected, rtol=1e-5, atol=1e-6)
    assert [key for key, _ in pipe.named_parameters()] != []
    assert {key for key, _ in pipe.named_parameters()} == {k for k, _ in model.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_sdpa_with_and_without_padding_and_the_logits(name, padded) -> None:
    inputs = batch(padded=padded)
    attention = "eager" if name in EAGER_ONLY else "sdpa"
    want, expected = unsplit(name, inputs, attention)
    model = build(name, attention)
    logits = []

    def keep(output, _target):
        logits.append(output.logits.detach())
        return output.loss

    pipe = zbpipe.wrap(
        model, microbatches=4, schedule="1f1b" if padded else "zb2p", local_ranks=2, loss_fn=keep,
        loss_weight=lambda labels: (labels[..., 1:] != -100).sum(),
    )  # fmt: skip
    loss = pipe.step(**inputs, target=inputs["labels"])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same(model.named_parameters(), want)
    with torch.no_grad():
        whole = want(**inputs, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits), whole, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_tied_gradients_are_the_same_bits_under_every_schedule(name) -> None:
    inputs = batch()
    found = []
    for schedule in ("gpipe", "1f1b", "zb1p", "zb2p"):
        model = build(name)
        pipe = zbpipe.wrap(model, microbatches=5, schedule=schedule, local_ranks=3)
        for _ in range(2):
            pipe.step(**inputs)
        found.append({key: p.grad for key, p in model.named_parameters()})
    for other in found[1:]:
        assert all(torch.equal(grad, other[key]) for key, grad in found[0].items())


def test_lengths_that_change_from_step_to_step() -> None:
    model = build("llama-tied")
    pipe = zbpipe.wrap(model, microbatches=2, schedule="zb2p", local_ranks=3)
    want = build("llama-tied")
    for size, length in ((4, 8), (7, 12), (5, 30), (4, 6)):
        inputs = batch(size, length, padded=False)
        expected = want(**inputs, use_cache=False).loss
        expected.backward()
        loss = pipe.step(**inputs)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert_same(model.named_parameters(), want)


def test_logits_reach_a_loss_function() -> None:
    inputs = batch()
    target = inputs.pop("labels")
    model = build("qwen3")

    def loss_fn(output, target):
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    pipe = zbpipe.wrap(
        model, microbatches=3, schedule="1f1b", local_ranks=2, loss_fn=loss_fn,
        loss_weight=lambda t: (t != -100).sum(),
    )  # fmt: skip
    want = build("qwen3")
    expected = loss_fn(want(**inputs), target)
    expected.backward()
    torch.testing.assert_close(pipe.step(**inputs, target=target), expected.detach())
    assert_same(model.named_parameters(), want)


def test_gradient_checkpointing() -> None:
    inputs = batch()
    want, expected = unsplit("llama", inputs)
    for reentrant in (False, True):
        model = build("llama")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        pipe = zbpipe.wrap(model, microbatches=3, schedule="zb2p", local_ranks=2)
        torch.testing.assert_close(pipe.step(**inputs), expected, rtol=1e-5, atol=1e-6)
        assert_same(model.named_parameters(), want)
        assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_the_model_stays_itself() -> None:
    model = build("gpt2")
    inputs = batch(padded=False)
    before = model(**inputs).logits.detach()
    pipe = zbpipe.wrap(model, microbatches=3, local_ranks=2, schedule="zb1p")
    pipe.step(**inputs)
    assert torch.equal(model(**inputs).logits, before)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert model.generate(inputs["input_ids"][:1, :4], max_new_tokens=2).shape == (1, 6)
    copy.deepcopy(model)
    text = pipe.summary()
    assert "not split" in text and "stage 0 (here): 2 layers, transformer.wte … " in text


def test_dropout_is_off_in_evaluation_everywhere() -> None:
    model = build("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model.train()
    pipe = zbpipe.wrap(model, microbatches=3, local_ranks=2, schedule="zb1p")
    inputs = batch(padded=False)
    value = pipe.eval_step(**inputs)
    assert model.training
    torch.testing.assert_close(value, model.eval()(**inputs).loss.detach(), rtol=1e-5, atol=1e-6)


def _tied(world, path: str, steps: int, thaw: bool) -> tuple[float, float, list[str]]:
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=world.rank, world_size=world.size
    )
    try:
        model = build("llama-tied")
        fired = []
        embedding = model.model.embed_tokens.weight
        embedding.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
        embedding.requires_grad_(not thaw)
        pipe = zbpipe.wrap(model, microbatches=3, schedule="zb2p", timeout=20)
        embedding.requires_grad_()
        inputs = batch()
        for _ in range(steps):
            loss = pipe.step(**inputs)
        want, expected = unsplit("llama-tied", inputs, steps=steps)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        assert_same(pipe.named_parameters(), want)
        if world.rank in (0, world.size - 1):
            # Once a step, and with the sum.
            assert len(fired) == steps
            assert torch.equal(fired[-1], embedding.grad)
        norm = pipe.clip_grad_norm_(1e9)
        total = nn.utils.clip_grad_norm_(want.parameters(), 1e9)
        return float(norm), float(total), [key for key, _ in pipe.named_parameters()]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("count", "thaw"), [(2, False), (3, False), (2, True)])
def test_tied_embeddings_are_summed_between_processes(count, thaw, tmp_path) -> None:
    """`thaw`: frozen when the model is wrapped, and not any more when it is trained."""
    outcomes = forked(_tied, count, str(tmp_path / "store"), 2, thaw)
    held = []
    for outcome in outcomes:
        assert outcome.error is None, [(o.rank, o.trace) for o in outcomes]
        norm, total, names = outcome.get()
        assert norm == pytest.approx(total, rel=1e-4)
        held.append(set(names))
    assert "model.embed_tokens.weight" in held[0]
    assert "lm_head.weight" in held[-1]
    everything = {key for key, _ in build("llama-tied").named_parameters()}
    assert everything <= set.union(*held)


def test_wrapping_probes_nothing_of_the_users() -> None:
    model = build("llama")
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    decoder = take_apart(model)
    assert calls == []
    assert torch.equal(state, torch.get_rng_state())
    assert [name for name, _ in decoder.before] == ["model.embed_tokens", "model.rotary_emb"]
    assert [name for name, _ in decoder.after] == ["model.norm", "lm_head"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.config, "output_router_logits", True), "auxiliary loss"),
        (lambda m: setattr(m.config, "layerdrop", 0.1), "layerdrop is 0.1"),
        (lambda m: setattr(m.config, "num_hidden_layers", 5), "5 layers cannot be told"),
    ],
    ids=["router", "layerdrop", "layers"],
)
def test_what_cannot_be_split_is_refused(change, message) -> None:
    model = build("llama")
    change(model)
    with pytest.raises(ConfigError, match=message):
        zbpipe.wrap(model, microbatches=2, local_ranks=2)


def test_fewer_layers_than_stages_and_sharing_in_between() -> None:
    with pytest.raises(ConfigError, match=r"stages=5.*4 layers"):
        zbpipe.wrap(build("llama"), microbatches=2, local_ranks=5)
    model = build("llama")
    model.model.layers[2].mlp = model.model.layers[0].mlp
    with pytest.raises(ConfigError, match=r"mlp.*shared by stages \[0, 1\]|shared by stages"):
        zbpipe.wrap(model, microbatches=2, local_ranks=4, partition=[1, 1, 1, 1])


def test_positional_and_missing_arguments() -> None:
    pipe = zbpipe.wrap(build("llama"), microbatches=3, local_ranks=2, schedule="1f1b")
    inputs = batch()
    with pytest.raises(ConfigError, match="positional"):
        pipe.step(inputs["input_ids"], inputs["labels"])
    ids = inputs["input_ids"]
    with pytest.raises(ConfigError, match="pass labels"):
        pipe.step(ids)


def test_experts_are_deferred() -> None:
    assert set(EXPERTS) <= set(FAMILIES)
    pipe = zbpipe.wrap(build("mixtral"), microbatches=3, local_ranks=2, schedule="1f1b")
    assert "experts" not in pipe.summary()


def test_the_table_in_the_docs_is_that_of_the_tests() -> None:
    docs = Path(__file__).parents[2] / "docs" / "models.md"
    assert table() in docs.read_text()
