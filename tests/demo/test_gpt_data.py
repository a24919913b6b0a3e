"""The demo's model and text: the same everywhere, and learnable in a few steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpipe.demo.data import Text, load
from zbpipe.demo.gpt import BATCH_SIZE, GPT, LEARNING_RATE, GPTConfig, loss_fn
from zbpipe.errors import ConfigError
from zbpipe.model.partition import layer_flops, partition
from zbpipe.model.split import Splitter

TINY = GPTConfig(hidden=32, layers=2, heads=2, sequence=32)


@pytest.fixture(scope="module")
def text() -> Text:
    return load()


def test_weights_depend_on_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    a = GPT(TINY, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    b, c = GPT(TINY, seed=3), GPT(TINY, seed=4)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a[0].token.weight, c[0].token.weight)
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in a.parameters())


def test_slices_are_plain_stages_of_the_same_layers() -> None:
    model = GPT(TINY)
    first, second = model[:2], model[2:]
    tokens = torch.arange(64).view(2, 32)
    assert torch.equal(second(first(tokens)), model(tokens))
    names = [name for stage in (first, second) for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert model[-1] is list(model)[-1]


def test_an_untrained_model_guesses_evenly() -> None:
    model = GPT(TINY)
    tokens = torch.arange(64).view(2, 32)
    assert abs(loss_fn(model(tokens), tokens).item() - math.log(256)) < 0.1


def test_no_position_sees_a_later_one() -> None:
    model, tokens = GPT(TINY), torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20] = 99
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same[:20].all() and not same[20:].any()


def test_the_loss_is_the_mean_cross_entropy_in_nats() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert torch.allclose(loss_fn(logits, targets), by_hand)


def test_all_but_the_norms_is_deferred_and_the_default_cut_is_even() -> None:
    with torch.device("meta"):
        model = GPT()
    report = Splitter(model).report()
    assert all(name.endswith("norm") for name, _ in report.not_split)
    assert report.deferred_share > 0.99
    costs = [layer_flops(layer) for layer in model]
    assert partition(costs, 2) == (5, 5)
    assert sum(costs[5:]) / sum(costs[:5]) < 1.03


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_loss_falls_in_four_steps(text, seed) -> None:
    model = GPT(TINY, seed=seed)
    # Steps of AdamW act in proportion to the width, an eighth of the default's here.
    optimizer = torch.optim.AdamW(model.parameters(), lr=8 * LEARNING_RATE)
    inputs, targets = text.batch("held_out", 0, 16, TINY.sequence)
    losses = []
    for step in range(5):
        with torch.no_grad():
            losses.append(loss_fn(model(inputs), targets).item())
        x, y = text.batch("train", step, BATCH_SIZE, TINY.sequence, seed)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"heads": 3}, "hidden=256 is not a multiple of heads=3"), ({"layers": 0}, "layers=0")],
)
def test_a_wrong_config_is_refused(wrong, message) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**wrong)


def test_the_text_is_python_and_its_halves_are_different_files(text) -> None:
    train, held_out = (bytes(t.tolist()) for t in (text.train, text.held_out))
    assert b"import " in train and b"import " in held_out
    assert len(train) > 5 * len(held_out) > 500_000


def test_the_split_goes_by_files_in_sorted_order(tmp_path) -> None:
    (tmp_path / "b").mkdir()
    for folder in ("site-packages", "test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_bytes(b"never")
    (tmp_path / "b" / "z.py").write_bytes(b"held")
    (tmp_path / "a.py").write_bytes(b"train")
    (tmp_path / "c.py").write_bytes(b"more")
    (tmp_path / "c.txt").write_bytes(b"no")
    text = load(tmp_path)
    assert bytes(text.train.tolist()) == b"trainmore"
    assert bytes(text.held_out.tolist()) == b"held"
    assert len(load(tmp_path, limit=7).held_out) == 2


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    step=st.integers(0, 10**6),
    seed=st.integers(0, 1000),
    batch=st.integers(1, 5),
    sequence=st.integers(1, 40),
)
def test_batches_are_windows_of_the_text_and_repeatable(step, seed, batch, sequence) -> None:
    text = Text(torch.arange(200, dtype=torch.uint8), torch.arange(100, 141, dtype=torch.uint8))
    for split, low, high in (("train", 0, 199), ("held_out", 100, 140)):
        x, y = text.batch(split, step, batch, sequence, seed)
        assert x.shape == y.shape == (batch, sequence) and x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(sequence))
        assert x.min() >= low and y.max() <= high
        again = text.batch(split, step, batch, sequence, seed)
        assert torch.equal(again[0], x)
    assert torch.equal(x, text.batch("held_out", step + 1, batch, sequence, seed + 1)[0])


def test_train_batches_differ_by_step_and_seed(text) -> None:
    first = text.batch("train", 0, 4, 32, seed=0)[0]
    assert not torch.equal(first, text.batch("train", 1, 4, 32, seed=0)[0])
    assert not torch.equal(first, text.batch("train", 0, 4, 32, seed=1)[0])


def test_missing_sources_and_wrong_splits_are_refused(tmp_path, text) -> None:
    with pytest.raises(ConfigError, match=r"fewer than two \.py files"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="split='test'"):
        text.batch("test", 0, 1, 8)
    with pytest.raises(ConfigError, match="needs 101 bytes"):
        Text(torch.zeros(50, dtype=torch.uint8), text.held_out).batch("train", 0, 1, 100)
