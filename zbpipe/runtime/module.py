"""What a pipeline has in common with an nn.Module: the everyday methods, for its own stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import ConfigError
from .stage import Stage

if TYPE_CHECKING:
    from typing_extensions import Self


class StagedModule:
    """The modules of this process's stages; `whole`: a model whose own forward they run in."""

    def __init__(self, stages: Mapping[int, Stage], whole: nn.Module | None) -> None:
        self._stages = stages
        self._whole = whole

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process's stages, under the model's own names, each once."""
        seen: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.root.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module's, for this process's stages."""
        for stage in self._stages.values():
            stage.root.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> Self:
        """As nn.Module's, for this process's stages."""
        for root in self._roots():
            root.train(mode)
        return self

    def _roots(self) -> list[nn.Module]:
        """The modules whose mode counts: all of a model that keeps its own forward."""
        return [self._whole] if self._whole else [stage.root for stage in self._stages.values()]

    def eval(self) -> Self:
        """As nn.Module's, for this process's stages."""
        return self.train(False)

    def generate(self, *_: Any, **__: Any) -> Any:
        """Not a pipeline's work: raises ConfigError, which says what to do."""
        raise ConfigError(
            "generate() on a pipeline: each rank holds some of the layers only. With local_ranks "
            "call the model's own generate(); else pipe.save(dir), and load the whole model from it"
        )

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of this process's stages, under the model's own names."""
        return {k: v for s in self._stages.values() for k, v in s.root.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this process's stages from a state_dict of theirs or of the whole model.

        Raises ConfigError naming the entries that are missing, before anything is changed.
        """
        own = {key: state[key] for key in self.state_dict() if key in state}
        if missing := [key for key in self.state_dict() if key not in own]:
            raise ConfigError(f"state lacks {', '.join(missing[:5])} ({len(missing)} entries)")
        for stage in self._stages.values():
            stage.root.load_state_dict({k: own[k] for k in stage.root.state_dict()})
