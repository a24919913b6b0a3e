"""Builds the fake CUDA runtime once a session, and points zbpipe at it."""

from __future__ import annotations

import pytest
from faking import Fake, compile_fake


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    return compile_fake(tmp_path_factory.mktemp("fakecuda"))


@pytest.fixture
def fake(fake_library, tmp_path, monkeypatch):
    """`fake(connections, jitter)`: the fake device, new, in this process and in those it forks."""

    begun: list[Fake] = []

    def begin(connections: int = 8, jitter: int = 0, seed: int = 1) -> Fake:
        state = tmp_path / f"state{len(list(tmp_path.iterdir()))}"
        settings = {
            "ZBPIPE_CUDART": fake_library,
            "ZBPIPE_NCCL": fake_library,
            "ZBPIPE_FAKE_CUDA": state,
            "CUDA_DEVICE_MAX_CONNECTIONS": connections,
            "ZBPIPE_FAKE_JITTER": jitter,
            "ZBPIPE_FAKE_SEED": seed,
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        for earlier in begun:
            earlier.ended = True
        made = Fake(fake_library)
        begun.append(made)
        made.lib.fake_reset()
        return made

    yield begin
    for earlier in begun:
        earlier.ended = True
