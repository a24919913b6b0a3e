"""Hugging Face decoders as they are: each stage runs the model's own forward around its layers.

On a stage the layers of other stages are stepped over, so that everything that the model computes
around its layers (masks, positions, rotary tables, per-layer kinds of attention) is its own code on
the microbatch's own inputs. The layer before the first own one hands out the received activation in
place of its result; the layer after the last own one takes that one's output and ends the forward.
Nothing is changed outside of a stage's run.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .partition import layer_flops
from .stages import Layer

_PROBE_TOKENS = 8


def is_hf(model: Any) -> bool:
    """Whether `model` is a transformers PreTrainedModel; transformers need not be installed."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


class _EndOfStage(BaseException):
    """Carries the last own layer's output out of the model's forward."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


@dataclass
class Decoder:
    """A decoder taken apart: its layers, and which other modules run before and after them."""

    model: nn.Module
    path: str  # of the layers' ModuleList
    layers: list[nn.Module]
    before: list[Layer]
    after: list[Layer]
    returns_tuple: bool

    def costs(self) -> list[float]:
        """FLOPs of each layer, a proxy; what is around them counts with the first and the last."""
        costs = [layer_flops(layer) for layer in self.layers]
        costs[0] += sum(layer_flops(module) for _, module in self.before)
        costs[-1] += sum(layer_flops(module) for _, module in self.after)
        return costs

    def stage_layers(self, partition: Sequence[int]) -> list[list[Layer]]:
        """(name, module) of everything that each stage holds parameters of, under global names."""
        stages, start = [], 0
        for count in partition:
            own = range(start, start + count)
            stages.append([(f"{self.path}.{i}", self.layers[i]) for i in own])
            start += count
        stages[0][:0] = self.before
        stages[-1].extend(self.after)
        return stages

    def runner(self, partition: Sequence[int], stage: int) -> Callable[[Any, Any], Any]:
        """run(received, batch) of one stage: the hidden states, or what the model returns."""
        first = sum(partition[:stage])
        end = first + partition[stage]
        return HfStage(self, first, end)


@dataclass
class HfStage:
    """Runs layers `first` to `end` - 1 inside the model's own forward."""

    decoder: Decoder
    first: int
    end: int
    _received: Any = field(default=None, repr=False)

    def __call__(self, received: Any, batch: Mapping[str, Any]) -> Any:
        """`received`: hidden states (none on the first stage); `batch`: the model's arguments.

        Returns hidden states, on the last stage the model's own output.
        """
        last = self.end == len(self.decoder.layers)
        kwargs = {k: v for k, v in batch.items() if last or k != "labels"}
        kwargs |= {"use_cache": False, "return_dict": True}
        training = torch.is_grad_enabled()
        self._received = received
        with self._stepping_over(training):
            try:
                if self.first > 0:
                    # What comes before the own layers belongs to other stages.
                    with torch.set_grad_enabled(False):
                        return self.decoder.model(**kwargs)
                return self.decoder.model(**kwargs)
            except _EndOfStage as end:
                return end.hidden
            finally:
                self._received = None

    @contextmanager
    def _stepping_over(self, training: bool) -> Iterator[None]:
        layers = self.decoder.layers
        with ExitStack() as stack:
            for index, layer in enumerate(layers[: self.first]):
                inject = index == self.first - 1
                stack.enter_context(_replaced(layer, self._passing(inject, training)))
            if self.end < len(layers):
                stack.enter_context(_replaced(layers[self.end], _end))
            yield

    def _passing(self, inject: bool, training: bool) -> Callable[..., Any]:
        as_tuple = self.decoder.returns_tuple

        def forward(*args: Any, **kwargs: Any) -> Any:
            if inject:
                torch.set_grad_enabled(training)  # from here on it is this stage's own work
            hidden = self._received if inject else _hidden(args, kwargs)
            return (hidden,) if as_tuple else hidden

        return forward


def _end(*args: Any, **kwargs: Any) -> Any:
    raise _EndOfStage(_hidden(args, kwargs))


def _hidden(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


@contextmanager
def _replaced(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let the layer's forward be another, and keep checkpointing and hooks away from it."""
    own: dict[str, Any] = layer.__dict__
    inside = {
        "forward": forward,
        "gradient_checkpointing": False,
        "_forward_hooks": OrderedDict(),
        "_forward_pre_hooks": OrderedDict(),
    }
    saved: dict[str, Any] = {k: own[k] for k in inside if k in own}
    own.update(inside)
    try:
        yield
    finally:
        for key in inside:
            del own[key]
        own.update(saved)


def take_apart(model: nn.Module) -> Decoder:
    """Find the layers, and by a probe on the meta device what runs before and after them.

    Raises ConfigError for a model whose layers cannot be told, whose modules cannot be told apart,
    or that does something across layers which a stage cannot do alone.
    """
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    _refuse(text)
    path, layers = _find_layers(model, int(text.num_hidden_layers))
    order, returns_tuple = _probe(model, path)
    before, after = _around(model, path, order)
    return Decoder(model, path, list(layers), before, after, returns_tuple)


def _refuse(config: Any) -> None:
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "config.output_router_logits is on: the router's auxiliary loss is a mean over all "
            "layers, which no stage sees; switch it off"
        )
    if getattr(config, "layerdrop", 0.0):
        raise ConfigError(
            f"config.layerdrop is {config.layerdrop}: ranks would drop different layers; want 0"
        )


def _find_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    # Lists inside a layer (experts, say) are not the decoder's.
    outer = [(n, m) for n, m in found if not any(n.startswith(o + ".") for o, _ in found if o != n)]
    if len(outer) != 1:
        names = ", ".join(name for name, _ in outer) or "none"
        raise ConfigError(
            f"model is a {type(model).__name__}: its {count} layers cannot be told (candidates: "
            f"{names}); pass a list of layers or stages"
        )
    return outer[0]


def _probe(model: nn.Module, path: str) -> tuple[dict[str, str], bool]:
    """("before" | "after") the layers for each module outside that runs, and a layer's return type.

    Runs a model of the same class and configuration on the meta device: no memory, no numbers, and
    none of the user's own modules.
    """
    config: Any = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        twin: nn.Module = type(model)(config)
    twin.to(torch.bfloat16)
    first: nn.Module = twin.get_submodule(f"{path}.0")
    seen: dict[str, str] = {}
    state = {"entered": False, "tuple": False}

    def enter(*_: Any) -> None:
        state["entered"] = True

    def leave(_module: Any, _args: Any, output: Any) -> None:
        state["tuple"] = isinstance(output, tuple)
        raise _EndOfStage(None)

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not state["entered"]:
                seen[name] = "before"

        return hook

    for name, module in twin.named_modules():
        if name != path and not name.startswith(path + "."):
            module.register_forward_pre_hook(note(name))
    first.register_forward_pre_hook(enter)
    first.register_forward_hook(leave)
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    mask = torch.ones(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    try:
        twin.eval()
        with torch.no_grad():
            twin(input_ids=tokens, attention_mask=mask, use_cache=False)
    except _EndOfStage:
        return seen, state["tuple"]
    except Exception as error:
        raise ConfigError(
            f"model is a {type(model).__name__} that cannot be probed on the meta device "
            f"({type(error).__name__}: {error}); pass a list of layers or stages"
        ) from error
    raise ConfigError(f"model is a {type(model).__name__} whose forward never ran its layers")


def _around(
    model: nn.Module, path: str, order: Mapping[str, str]
) -> tuple[list[Layer], list[Layer]]:
    """Modules with parameters or buffers of their own outside the layers, before and after them."""
    before: list[Layer] = []
    after: list[Layer] = []
    for name, module in model.named_modules():
        if name == path or name.startswith(path + "."):
            continue
        if not any(True for _ in (*module.parameters(False), *module.buffers(False))):
            continue
        if not name:
            raise ConfigError(
                f"model is a {type(model).__name__} with parameters outside its modules: "
                "pass a list of layers or stages"
            )
        (before if order.get(name) == "before" else after).append((name, module))
    return before, after


def tied(stages: Sequence[Sequence[Layer]]) -> list[nn.Parameter]:
    """Parameters that the first and the last stage share. Raises ConfigError on other sharing."""
    owner: dict[int, set[int]] = {}
    names: dict[int, str] = {}
    found: dict[int, nn.Parameter] = {}
    for stage, layers in enumerate(stages):
        for prefix, module in layers:
            for name, parameter in module.named_parameters():
                owner.setdefault(id(parameter), set()).add(stage)
                names.setdefault(id(parameter), f"{prefix}.{name}")
                found[id(parameter)] = parameter
    shared = []
    for key, where in owner.items():
        if len(where) == 1:
            continue
        if where != {0, len(stages) - 1}:
            raise ConfigError(
                f"{names[key]} is shared by stages {sorted(where)}: only the first and the last "
                "stage may share a parameter"
            )
        shared.append(found[key])
    return shared


# transformers' names of losses that are a mean over the labels that are not -100.
_MEAN_LOSSES = ("ForTokenClassification", "ForSequenceClassification")


def label_counter(
    model: nn.Module, batch: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], torch.Tensor] | None:
    """How many of a microbatch's labels the model's own loss is a mean over; None: it is a sum.

    A causal loss shifts the labels, unless it is given shifted ones; -100 does not count. With
    `num_items_in_batch` the model divides by that itself.
    Raises ConfigError for a loss of which this is not known.
    """
    if batch.get("num_items_in_batch") is not None:
        return None
    kind = getattr(model, "loss_type", None)
    if kind in (None, "ForCausalLM"):
        if batch.get("shift_labels") is not None:
            return lambda part: (part["shift_labels"] != -100).sum()
        return lambda part: (part["labels"][..., 1:] != -100).sum()
    if kind in _MEAN_LOSSES:
        return lambda part: (part["labels"] != -100).sum()
    raise ConfigError(
        f"model is a {type(model).__name__} whose loss is {kind!r}: give wrap a loss_weight(batch)"
    )
