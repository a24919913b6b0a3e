"""Every test: one torch thread, and hypothesis with fixed seeds."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)
