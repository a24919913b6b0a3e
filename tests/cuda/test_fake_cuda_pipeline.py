"""wrap on the fake device: the CUDA path of the runtime, equal to the unsplit model.

torch computes on the CPU here, at once, where on a GPU it would enqueue. So a callback first waits
for its lane's stream, as a kernel would. All else is as on CUDA: one enqueueing thread a rank,
events between lanes, payloads copied by streams into slots that are poisoned when let go of.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faking import Fake

import zbpipe
from cases import CASES, CHUNKED, HALVES, Case
from counting import kernels_counted
from crews import forked
from families import batch, build
from unsplit import assert_same_gradients, gradients, reference
from zbpipe.runtime import device as devices
from zbpipe.runtime import rank as ranks
from zbpipe.runtime.device import Device

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
BY_NAME = {case.name: case for case in CASES}


class OnFake(Device):
    """CUDA as far as zbpipe's native side is concerned, the CPU for torch."""

    index = 0

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        fake.lib.fake_host_reads()  # torch's tensors
        self.waits = 0

    @contextmanager
    def lane(self, executor: Any, lane: int) -> Iterator[None]:
        self.fake.settle([executor.stream(lane)])
        self.waits += 1
        yield

    def storage(self, slot: Any) -> torch.UntypedStorage | None:
        interface = slot.__cuda_array_interface__
        nbytes, data = interface["shape"][0], interface["data"][0]
        if not nbytes:
            return None
        memory = (ctypes.c_uint8 * nbytes).from_address(data)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


@pytest.fixture
def on_fake(fake, monkeypatch):
    """`on_fake(connections, jitter)`: ranks made from now on are on the fake device."""

    def begin(connections: int = 8, jitter: int = 0) -> OnFake:
        made = OnFake(fake(connections, jitter))
        monkeypatch.setattr(devices, "of", lambda *modules: made)
        return made

    return begin


def wrapped(case: Case, model: Any, m: int, schedule: str, ranks: int = 2) -> zbpipe.Pipeline:
    chunks = 2 if schedule in CHUNKED else 1
    pipe = zbpipe.wrap(
        model,
        microbatches=m,
        schedule=schedule,
        partition=case.split(ranks * chunks),
        loss_fn=case.loss_fn,
        loss_weight=case.loss_weight,
        local_ranks=ranks,
    )
    pipe._settings = replace(pipe._settings, poison=True)
    return pipe


@pytest.mark.parametrize(
    ("name", "schedule", "ranks", "connections"),
    [
        *((case.name, "zb2p", 2, 8) for case in CASES),
        *(("blocks", schedule, 3, 1) for schedule in ("gpipe", "1f1b", "zb1p", "zb2p")),
    ],
)
def test_the_cuda_path_equals_the_unsplit_model(on_fake, name, schedule, ranks, connections):
    device = on_fake(connections, jitter=200)
    case = BY_NAME[name]
    want, losses = reference(case, 5)
    model = case.build()
    pipe = wrapped(case, model, 5, schedule, ranks)
    for (x, y), expected in zip(case.batches(), losses, strict=True):
        close = max(case.tolerance, 1e-10)
        torch.testing.assert_close(pipe.step(x, target=y), expected, rtol=close, atol=close)
    assert_same_gradients(gradients(model.named_parameters()), want, case.tolerance)
    assert set(pipe._crew.transports().values()) <= {"local"} and pipe._crew.cuda
    x, y = case.batches()[0]
    assert torch.isfinite(pipe.eval_step(x, target=y))
    pipe.close()
    assert device.waits > 0
    assert device.fake.reports() == []


def test_several_stages_a_rank_and_memory(on_fake):
    device = on_fake()
    case = BY_NAME["blocks"]
    want, _ = reference(case, 4)
    model = case.build()
    pipe = wrapped(case, model, 4, "zb_v")
    pipe.measure_memory()
    for x, y in case.batches():
        pipe.step(x, target=y)
    assert_same_gradients(gradients(model.named_parameters()), want, case.tolerance)
    timeline = pipe.timeline()
    assert max(timeline.peak(rank) for rank in range(2)) > 0
    for rank in range(2):
        spans = timeline.compute(rank)
        assert all(a.end <= b.start + 1e-4 for a, b in pairwise(spans))
    pipe.close()
    assert device.fake.reports() == []


def test_tied_embeddings_cross_by_streams_of_their_own(on_fake):
    device = on_fake()
    inputs = batch()
    model, want = build("llama-tied"), build("llama-tied")
    pipe = zbpipe.wrap(model, microbatches=3, schedule="zb2p", local_ranks=2)
    loss = pipe.step(**inputs)
    expected = want(**inputs, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    a, b = model.model.embed_tokens.weight.grad, want.model.embed_tokens.weight.grad
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    pipe.close()
    assert device.fake.reports() == []


def test_ws_of_a_run_are_one_launch_a_weight(on_fake, monkeypatch):
    """As on CUDA: held, and added by our operators; with the bits of one after the other."""
    device = on_fake(jitter=200)
    calls = kernels_counted(monkeypatch)
    found = []
    for held in (False, True):
        monkeypatch.setattr(ranks, "groups", lambda device, held=held: held)
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).bfloat16()
        pipe = zbpipe.wrap(
            model, microbatches=6, schedule=zbpipe.Schedule.from_csv(HALVES), local_ranks=2,
            loss_fn=torch.nn.functional.mse_loss,
        )  # fmt: skip
        pipe._settings = replace(pipe._settings, poison=True)
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(17, 8, generator=generator).bfloat16() for _ in range(2))
        calls.clear()
        pipe.step(x, target=y)
        # 4 weights and 6 microbatches, or 2 runs of them.
        grouped, alone = calls["grouped_wgrad_"], calls["wgrad_"]
        assert (grouped, alone) == ((8, 0) if held else (0, 24))
        found.append(gradients(model.named_parameters()))
        pipe.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert device.fake.reports() == []


def test_an_error_on_the_enqueueing_thread_reaches_step(on_fake):
    on_fake()

    class Fails(torch.nn.Module):
        def forward(self, x):
            raise ValueError("no such luck")

    model = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), Fails()]
    pipe = zbpipe.wrap(model, microbatches=2, schedule="1f1b", local_ranks=2, partition=[1, 2])
    with pytest.raises(zbpipe.StageError, match=r"rank 1.*stage 1.*no such luck"):
        pipe.step(torch.randn(4, 4))


def _between_processes(world, store: str, library: str, transport: str | None) -> list[str]:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    try:
        torch.set_num_threads(1)
        fake = Fake(library)
        devices.of = lambda *modules: OnFake(fake)
        case = BY_NAME["blocks"]
        want, losses = reference(case, 5)
        model = case.build()
        pipe = zbpipe.wrap(
            model, microbatches=5, schedule="zb1p", partition=case.split(world.size),
            loss_fn=case.loss_fn, timeout=30, transport=transport,
        )  # fmt: skip
        for (x, y), expected in zip(case.batches(), losses, strict=True):
            torch.testing.assert_close(pipe.step(x, target=y), expected, rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(pipe.named_parameters()), want, case.tolerance)
        kinds = sorted(set(pipe._crew.transports().values()))
        assert f"rank 0 → 1: {kinds[0]}" in pipe.summary()
        pipe.close()
        return kinds + fake.reports()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("transport", "found"), [(None, "ipc"), ("nccl", "nccl"), ("tcp", "tcp"), ("torch", "torch")]
)
def test_between_processes(fake, tmp_path, transport, found):
    made = fake()
    outcomes = forked(_between_processes, 2, str(tmp_path / "store"), made.path, transport)
    assert all(o.error is None for o in outcomes), [(o.rank, o.trace) for o in outcomes]
    assert [o.get() for o in outcomes] == [[found], [found]]


def test_parameters_on_two_kinds_of_device_are_refused(fake, monkeypatch):
    assert devices.of(torch.nn.Tanh()) is None
    assert devices.of(torch.nn.Linear(1, 1, device="meta")) is None
    assert devices.of(torch.nn.Linear(1, 1), torch.nn.Tanh()).kind == "cpu"
    model = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    kinds = iter([Device(), OnFake(fake())])
    pipe = zbpipe.wrap(model, microbatches=2, schedule="1f1b", local_ranks=2)
    monkeypatch.setattr(pipe, "_device", lambda rank: next(kinds))
    with pytest.raises(zbpipe.ConfigError, match="rank 0 has its parameters on the CPU"):
        pipe._new_crew()
