"""Every test: one torch thread, and fixed seeds, of torch and of hypothesis."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
