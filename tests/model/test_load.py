"""Checkpoints: each rank reads its own stages; on the meta device it gets no more than them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

import zbpipe
from crews import forked
from families import FAMILIES, batch, build
from zbpipe import ConfigError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def on_meta(name: str, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation="eager")
    return model.to(dtype)


def gradients(model: nn.Module, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    found = dict(model.named_parameters(remove_duplicate=False))
    return loss.detach(), {k: p.grad for k, p in found.items() if p.grad is not None}


def assert_close(named, want: dict[str, torch.Tensor]) -> None:
    scale = max(float(grad.abs().max()) for grad in want.values())
    for key, p in named:
        assert (p.grad is None) == (key not in want), key
        if p.grad is not None:
            torch.testing.assert_close(p.grad, want[key], rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_loaded_as_transformers_loads_it(name, tmp_path) -> None:
    model, inputs = build(name), batch()
    model.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    pipe = zbpipe.wrap(on_meta(name, model.dtype), microbatches=3, schedule="1f1b", local_ranks=2)
    pipe.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    expected, want = gradients(model, inputs)
    torch.testing.assert_close(pipe.step(**inputs), expected, rtol=1e-5, atol=1e-6)
    assert_close(pipe.named_parameters(), want)


def _own_stages_only(world, store: str, folder: str, name: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    try:
        torch.set_num_threads(1)
        inputs, whole = batch(), build(name)
        expected, want = gradients(whole, inputs)
        model = on_meta(name, whole.dtype)
        pipe = zbpipe.wrap(model, microbatches=3, schedule="zb1p", timeout=20)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.load(folder)
        torch.testing.assert_close(pipe.step(**inputs), expected, rtol=1e-5, atol=1e-6)
        assert_close(pipe.named_parameters(), want)
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for p in model.parameters() if not p.is_meta}  # fmt: skip
        own = sum(p.numel() * p.element_size() for p in pipe.parameters())
        assert own <= sum(held.values()) < own + 1000
        assert own < 0.8 * sum(p.numel() * p.element_size() for p in model.parameters())
        optimizer.step()
        pipe.save(f"{folder}/trained")
        before = pipe.eval_step(**inputs)
        again = hf.AutoModelForCausalLM.from_pretrained(
            f"{folder}/trained", attn_implementation="eager"
        )
        found = again(**inputs, use_cache=False).loss.detach()
        torch.testing.assert_close(before, found, rtol=1e-5, atol=1e-6)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama", 2), ("llama-tied", 3), ("gemma3", 2), ("mixtral", 2)]
)
def test_a_rank_takes_no_memory_but_for_its_own_stages(name, ranks, tmp_path) -> None:
    folder = tmp_path / "model"
    build(name).save_pretrained(folder)
    outcomes = forked(_own_stages_only, ranks, str(tmp_path / "store"), str(folder), name)
    assert all(o.error is None for o in outcomes), [(o.rank, o.trace) for o in outcomes]


def layers() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def wrapped(model: nn.Module) -> zbpipe.Pipeline:
    return zbpipe.wrap(
        model, microbatches=2, local_ranks=2, schedule="1f1b", loss_fn=nn.functional.mse_loss
    )


def test_layers_on_meta_come_back_from_what_save_wrote(tmp_path) -> None:
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    model = layers()
    pipe = wrapped(model)
    pipe.step(x, target=y)
    pipe.save(tmp_path)
    with torch.device("meta"):
        empty = layers()
    first = next(empty.parameters())
    first.marked, fired, seen = "kept", [], []
    first.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    first.register_hook(lambda grad: seen.append(grad))
    again = wrapped(empty)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    again.load(tmp_path)
    assert next(empty.parameters()) is first and first.marked == "kept"
    for (key, a), (other, b) in zip(
        model.state_dict().items(), empty.state_dict().items(), strict=True
    ):
        assert key == other and torch.equal(a, b)
    model.zero_grad()
    torch.testing.assert_close(again.step(x, target=y), pipe.step(x, target=y))
    assert len(fired) == 1 and fired[0] is first
    assert len(seen) == 2  # once a microbatch, as ever
    weight = first.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, first)


def test_a_single_file_and_another_dtype(tmp_path) -> None:
    model = layers()
    state = {k: v.double() + 1 for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "some.safetensors")
    wrapped(model).load(tmp_path / "some.safetensors")
    assert all(torch.equal(v, state[k].to(v.dtype)) for k, v in model.state_dict().items())


def test_a_step_before_load_is_refused() -> None:
    with torch.device("meta"):
        model = layers()
    with pytest.raises(ConfigError, match=r"0\.weight is on the meta device: call load"):
        wrapped(model).step(torch.randn(6, 4), target=torch.randn(6, 2))


def _drop(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in state.items() if not k.endswith("3.weight")},
              folder / "model.safetensors")  # fmt: skip


def _reshape(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["3.weight"] = state["3.weight"].t().contiguous()
    save_file(state, folder / "model.safetensors")


def _spoil(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not what it says")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"lacks 3\.weight \(1 of 9 entries"),
        (_reshape, r"other shapes: 3\.weight \(6, 2\) for \(2, 6\)"),
        (_spoil, "is no safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no checkpoint at"),
    ],
    ids=["missing", "shape", "spoilt", "nothing"],
)
def test_a_checkpoint_of_something_else_changes_nothing(change, message, tmp_path) -> None:
    model = layers()
    save_file({k: v + 1 for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    change(tmp_path)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        wrapped(model).load(tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_checkpoint_of_another_family_is_refused(tmp_path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    pipe = zbpipe.wrap(on_meta("llama", torch.float64), microbatches=2, local_ranks=2)
    with pytest.raises(ConfigError, match=r"lacks model\.embed_tokens\.weight"):
        pipe.load(tmp_path)


def test_generate_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"pipe\.save\(dir\)"):
        wrapped(layers()).generate(torch.zeros(1, 1))
