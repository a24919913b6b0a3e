"""Lets a checkout on the path import `zbpipe.kernels`, which lies beside the package there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def find_kernels(package: str, folder: Path) -> None:
    """Make ../kernels the package's `kernels`, unless `folder`, the package's, has them installed.

    Not by a longer `__path__`: every folder of the checkout would then be a part of the package.
    """
    beside = folder.parent / "kernels" / "__init__.py"
    if (folder / "kernels").is_dir() or not beside.is_file():
        return
    name = f"{package}.kernels"
    spec = importlib.util.spec_from_file_location(
        name, beside, submodule_search_locations=[str(beside.parent)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{beside} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[package].__dict__["kernels"] = module
