"""Actions as torch operations whose exact results are known, on the CPU or on a CUDA device."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zbpipe.program import Programs, compile
from zbpipe.runtime.executor import Crew
from zbpipe.runtime.world import World
from zbpipe.schedule import build
from zbpipe.schedule.core import Action

HOLD = 3  # what a stage multiplies by; small integers are exact in float32


class TorchRelay:
    """One rank: F(x) = 3x + stage, I(g) = g + x, W adds x·g's mean to the stage's sum."""

    def __init__(self, crew: Crew, programs: Programs, rank: int, device: int | None) -> None:
        self.program = programs.ranks[rank]
        self.executor = crew.executors[rank]
        self.last = len({i.action.stage for p in programs.ranks for i in p.instructions}) - 1
        self.device = torch.device("cpu") if device is None else torch.device("cuda", device)
        self.stream: Any = None
        if device is not None:
            self.stream = torch.cuda.ExternalStream(self.executor.stream(0), device=self.device)

    def begin(self, run: int, numel: int) -> TorchRelay:
        self.run, self.numel = run, numel
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}
        self.handed: dict[Action, torch.Tensor] = {}
        self.sending: list[tuple[int, torch.Tensor]] = []
        self.sums: dict[tuple[int, int], torch.Tensor] = {}
        return self

    def __call__(self, index: int) -> None:
        scope: AbstractContextManager[Any] = nullcontext()
        if self.stream is not None:
            scope = torch.cuda.stream(self.stream)
        with scope, torch.no_grad():
            self._run(index, self.program.instructions[index].action)

    def _run(self, index: int, action: Action) -> None:
        self.sending = [s for s in self.sending if not self.executor.finished(s[0])]
        stage, mb = place = action.stage, action.microbatch
        if action.kind == "F":
            x = self._take(index, Action(stage - 1, "F", mb)) if stage else self._batch(mb)
            self.inputs[place] = x
            self._pass_on(index, action, HOLD * x + stage)
        elif action.kind in "IB":
            grad = self._batch(mb)
            if stage < self.last:
                above = [Action(stage + 1, kind, mb) for kind in "IB"]
                grad = self._take(index, *above)
            x = self.inputs.pop(place)
            self.kept[place] = (x, grad)
            self._pass_on(index, action, grad + x)
        if action.kind in "WB":
            x, grad = self.kept.pop(place)
            self.sums[place] = (x.double() * grad.double()).mean()

    def _batch(self, microbatch: int) -> torch.Tensor:
        return torch.full((self.numel,), float(self.run + microbatch + 1), device=self.device)

    def _take(self, index: int, *sources: Action) -> torch.Tensor:
        need = self.program.needs.get(index)
        if need is None:
            return next(self.handed.pop(s) for s in sources if s in self.handed)
        receive = self.program.instructions[need]
        header, slot = self.executor.message(receive.channel, receive.slot)
        assert pickle.loads(header) == (self.run, tuple(receive.action))
        if self.stream is None:
            return torch.frombuffer(memoryview(slot), dtype=torch.float32)
        return torch.as_tensor(slot, device=self.device).view(torch.float32)

    def _pass_on(self, index: int, action: Action, result: torch.Tensor) -> None:
        send = self.program.sends.get(index)
        if send is None:
            self.handed[action] = result
            return
        nbytes = result.numel() * result.element_size()
        header = pickle.dumps((self.run, tuple(action)))
        self.executor.post(send, header, [(result.data_ptr(), nbytes, 0)], nbytes)
        self.sending.append((send, result))


def expected(stages: int, value: float) -> dict[int, float]:
    """Each stage's W for a microbatch whose batch holds `value`."""
    inputs = [value]
    for stage in range(stages - 1):
        inputs.append(HOLD * inputs[-1] + stage)
    grad, out = value, {}
    for stage in reversed(range(stages)):
        out[stage] = inputs[stage] * grad
        grad += inputs[stage]
    return out


def relay(
    world: World,
    name: str,
    microbatches: int,
    device: int | None,
    sizes: list[int],
    transport: str | None = None,
) -> None:
    """Runs with tensors of each of `sizes` elements; raises where a result is not the exact one."""
    programs = compile(build(name, world.size, microbatches))
    devices = None if device is None else dict.fromkeys(world.local, device)
    forced = {} if transport is None else dict.fromkeys(programs.slots, transport)
    crew = Crew(world, 60.0, poison=True, devices=devices, forced=forced)
    crew.connect(programs.slots)
    loaded = crew.load(programs)
    relays = {rank: TorchRelay(crew, programs, rank, device) for rank in world.local}
    stages = next(iter(relays.values())).last + 1
    for run, numel in enumerate(sizes):
        crew.run(loaded, {rank: r.begin(run, numel) for rank, r in relays.items()})
        for r in relays.values():
            for (stage, mb), got in r.sums.items():
                want = expected(stages, run + mb + 1.0)[stage]
                assert got.item() == want, (stage, mb, got.item(), want)
    crew.close()
