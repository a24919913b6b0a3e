"""Read each rank's own stages from a checkpoint: safetensors, as `save` or Hugging Face write them.

A model on the meta device gets its memory here, and no rank more than its own stages. Names and
layouts of a Hugging Face checkpoint are converted by transformers itself, in a twin of the model on
the meta device.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..errors import ConfigError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load(
    path: Path,
    roots: Sequence[nn.Module],
    whole: nn.Module | None = None,
    everywhere: Iterable[nn.Module] = (),
    device: torch.device | None = None,
) -> None:
    """Fill the parameters and buffers of `roots` (stages) from the checkpoint at `path`.

    `path`: a safetensors file, or a folder with one or with an index. `whole`: the Hugging Face
    model that the stages are of, and the modules before its layers, which run `everywhere`.
    `device`: of what is on meta so far, by default the CPU. Tensors are cast to the dtypes that the
    model has. Parameters stay the same objects, so an optimizer that was made before still holds
    them.
    Raises ConfigError where there is no checkpoint, or one that lacks entries or has them in other
    shapes, naming them, before anything was changed.
    """
    own = _named(roots)
    with ExitStack() as stack:
        entries = _entries(path, stack)
        if whole is None:
            found = {name: entries[name][...] for name in own if name in entries}
            buffers: dict[str, torch.Tensor] = {}
        else:
            found, buffers = _converted(whole, own, entries)
    _check(path, own, found)
    for name, tensor in own.items():
        _fill(roots, name, tensor, found[name], device)
    if whole is not None:
        _materialize(whole, everywhere, buffers, device)


def _named(roots: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by the model's own names."""
    named = ((k, v) for root in roots for k, v in root.state_dict(keep_vars=True).items())
    return {k: v for k, v in named if isinstance(v, torch.Tensor)}  # and no extra state


def _entries(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Name → slice of a safetensors file, not yet read. Files are open as long as `stack` is."""
    if path.is_dir() and (path / INDEX).is_file():
        shards = set(json.loads((path / INDEX).read_text())["weight_map"].values())
        files = sorted(path / shard for shard in shards)
    else:
        files = [path / _SINGLE if path.is_dir() else path]
    entries: dict[str, Any] = {}
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"no checkpoint at {str(path)!r}: {file.name} is not there; want a safetensors "
                f"file, or a folder with {_SINGLE} or {INDEX}"
            )
        try:
            reader = stack.enter_context(safe_open(file, framework="pt"))
        except Exception as error:
            raise ConfigError(f"{str(file)!r} is no safetensors file: {error}") from error
        entries.update((key, reader.get_slice(key)) for key in reader.keys())  # noqa: SIM118
    return entries


def _check(path: Path, own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    if missing := [name for name in own if name not in found]:
        raise ConfigError(
            f"the checkpoint {str(path)!r} lacks {', '.join(missing[:5])} ({len(missing)} of "
            f"{len(own)} entries of these stages): is it of this model?"
        )
    wrong = [
        f"{name} {tuple(found[name].shape)} for {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if found[name].shape != tensor.shape
    ]
    if wrong:
        raise ConfigError(
            f"the checkpoint {str(path)!r} has other shapes: {', '.join(wrong[:5])} "
            f"({len(wrong)} entries): is it of this model?"
        )


def _fill(
    roots: Sequence[nn.Module],
    name: str,
    tensor: torch.Tensor,
    value: torch.Tensor,
    device: torch.device | None,
) -> None:
    if not tensor.is_meta:
        with torch.no_grad():
            tensor.copy_(value)
        return
    value = value.to(device, tensor.dtype, copy=True)  # a file's memory is not ours to write
    if isinstance(tensor, nn.Parameter):
        _become(tensor, value)
        return
    for root in roots:
        for prefix, module in root.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is tensor and f"{prefix}.{key}" == name:
                    module._buffers[key] = value


def _become(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter on meta its numbers; it stays the same object, attributes and hooks too."""
    filled = nn.Parameter(value, parameter.requires_grad)
    filled.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, filled)
    # The dicts of hooks stay with the object; autograd is told of them anew.
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    parameter._backward_hooks = parameter._backward_hooks


# --- Hugging Face ---------------------------------------------------------------------------------


def _converted(
    model: nn.Module, own: Mapping[str, torch.Tensor], entries: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the checkpoint has for `own` under the model's names, and non-persistent buffers."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        convert_and_load_state_dict_in_model,
        rename_source_key,
    )
    from transformers.modeling_utils import LoadStateDictConfig

    twin = _twin(model)
    names = dict(twin.state_dict())
    aliases = _aliases(model)
    wanted = set(own).union(*(aliases.get(name, ()) for name in own))
    modules = {name.rpartition(".")[0] for name in wanted}
    mapping = get_model_conversion_mapping(twin)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def ours(key: str) -> bool:
        name, _ = rename_source_key(key, renamings, converters, twin.base_model_prefix, names)
        # A checkpoint in the model's own names may look as if it were to be renamed.
        return name.rpartition(".")[0] in modules or key in wanted

    config = LoadStateDictConfig(weight_mapping=[*renamings, *converters])
    kept = {key: value for key, value in entries.items() if ours(key)}
    convert_and_load_state_dict_in_model(twin, kept, config, disk_offload_index=None)
    there = {k: v for k, v in twin.state_dict(keep_vars=True).items() if not v.is_meta}
    found = {}
    for name in own:
        for other in (name, *aliases.get(name, ())):
            if other in there:
                found[name] = there[other].detach()
    return found, _buffers(twin)


def _twin(model: nn.Module) -> Any:
    config: Any = copy.deepcopy(model.config)
    with torch.device("meta"):
        return type(model)(config)


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Other names of each parameter that has several."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {n: [o for o in names if o != n] for names in by_id.values() for n in names}


def _buffers(twin: Any) -> dict[str, torch.Tensor]:
    """Buffers that are in no checkpoint, as the model's own initialisation computes them."""
    found: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for prefix, module in twin.named_modules():
            names = [n for n in module._non_persistent_buffers_set if _on_meta(module, n)]
            if not names:
                continue
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # what transformers itself goes by
            for name in names:
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
            twin._init_weights(module)
            found.update((f"{prefix}.{name}", module._buffers[name]) for name in names)
    return found


def _on_meta(module: nn.Module, name: str) -> bool:
    buffer = module._buffers.get(name)
    return buffer is not None and buffer.is_meta


def _materialize(
    model: nn.Module,
    everywhere: Iterable[nn.Module],
    buffers: Mapping[str, torch.Tensor],
    device: torch.device | None,
) -> None:
    """Buffers on meta; and zeros for parameters of modules that run on other stages' behalf.

    What comes before the layers runs on every stage, on all but the first for nothing but the shape
    of what it returns. One number stands for the whole tensor: it takes no memory.
    """
    for name, value in buffers.items():
        prefix, _, key = name.rpartition(".")
        module = model.get_submodule(prefix)
        if _on_meta(module, key):
            module._buffers[key] = value.to(device)
    for module in everywhere:
        for parameter in module.parameters():
            if parameter.is_meta:
                zero = torch.zeros((), dtype=parameter.dtype, device=device)
                _become(parameter, zero.expand(parameter.shape))


def on_meta(roots: Iterable[nn.Module]) -> Iterator[str]:
    """Names of parameters and buffers of the stages that have no numbers yet."""
    for root in roots:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            if tensor.is_meta:
                yield name
