"""zbpipe: zero-bubble pipeline-parallel training for PyTorch."""

from ._version import __version__

__all__ = ["__version__"]
