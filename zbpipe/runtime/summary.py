"""What `pipe.summary()` says: each stage's layers, costs and split, transports, and the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..costs import Costs
from ..model.rules.accumulate import left_to_kernels
from ..model.rules.choose import lies_transposed
from ..model.stages import Layer
from ..plan import Plan
from ..schedule.core import Schedule
from .planner import fused
from .stage import Stage

_SHOWN = 2  # modules of one kind that are named
_ROWS = 4096  # tokens of a microbatch, to look a kernel up before one was seen


def summary(
    layers: Sequence[Sequence[Layer]],
    sizes: Sequence[int],
    stages: Mapping[int, Stage],
    plan: Plan | None,
    transports: Mapping[tuple[int, int], str],
) -> str:
    """Text, a few lines a stage. `layers`: what each stage holds; `stages`: those of this process.

    `sizes`: the number of layers of each stage, without what stands before and after all of them.
    """
    lines: list[str] = []
    costs = None if plan is None or plan.costs.source != "profiled" else plan.costs
    for index, own in enumerate(layers):
        where = "here" if index in stages else "on another rank"
        names = f"{own[0][0]} … {own[-1][0]}" if len(own) > 1 else own[0][0]
        lines.append(f"stage {index} ({where}): {sizes[index]} layers, {names}")
        if costs is not None:
            lines.append(f"  {_costs(costs, index)}")
        if index in stages:
            lines += [f"  {line}" for line in _split(stages[index])]
    lines += [f"rank {a} → {b}: {name}" for (a, b), name in sorted(transports.items())]
    if plan is not None:
        lines.append(plan.summary())
        lines += _together(plan.schedule)
    return "\n".join(lines)


def _together(schedule: Schedule) -> Iterator[str]:
    """The W's that are held for one launch, a line a rank."""
    runs = fused(schedule).runs
    for rank in range(schedule.ranks):
        own = [run for run in runs if schedule.placement[run[0].stage] == rank]
        if own:
            named = ", ".join(f"{run[0]} to {run[-1]}" for run in own[:_SHOWN])
            more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
            yield f"rank {rank}: one launch a weight on CUDA for W's from {named}{more}"


def _costs(costs: Costs, stage: int) -> str:
    times = (costs.forward[stage], costs.input_grad[stage], costs.weight_grad[stage])
    f, i, w = (f"{1e3 * seconds:.2f}" for seconds in times)
    act, stash = (f"{nbytes / 1e6:.2f}" for nbytes in (costs.act[stage], costs.stash[stage]))
    return (
        f"F {f} ms, I {i} ms, W {w} ms; act {act} MB, stash {stash} MB a microbatch, "
        f"{costs.transient[stage] / 1e6:.2f} MB more while an action runs"
    )


def _split(stage: Stage) -> Iterator[str]:
    """Parameters, the share of W that is deferred, and what is not, by reason."""
    report = stage.splitter.report(stage.eager)
    count = sum(parameter.numel() for parameter in stage.parameters)
    yield f"{count:,} parameters; {report.deferred_share:.1%} of W's FLOPs are deferred"
    yield from _kernels(stage)
    by_reason: dict[str, list[str]] = {}
    for name, reason in report.not_split:
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"not split: {', '.join(names[:_SHOWN])}{more}: {reason}"


def _kernels(stage: Stage) -> Iterator[str]:
    """What computes dX and dW, by shape where the device has a choice; without autocast."""
    from ..kernels import dispatch

    modules = [m for m in stage.root.modules() if lies_transposed(m)]
    turned = {id(p) for m in modules for p in m.parameters(recurse=False)}
    found: dict[str, list[str]] = {}
    for weight in stage.splitter.products():
        transposed = id(weight) in turned
        outs, ins = reversed(weight.shape) if transposed else weight.shape
        chosen = dispatch.names(weight.device, weight.dtype, (_ROWS, outs, ins), transposed)
        for name, by_kernel in zip(("dgrad", "wgrad"), left_to_kernels(weight), strict=True):
            if not by_kernel:
                chosen[name] = f"torch on {weight.device.type}"
        by = "; ".join(f"{name} by {who}" for name, who in chosen.items())
        found.setdefault(by, []).append(f"{outs} × {ins}")
    for by, shapes in found.items():
        distinct = list(dict.fromkeys(shapes))
        more = f" and {len(distinct) - _SHOWN} shapes more" if len(distinct) > _SHOWN else ""
        yield f"{', '.join(distinct[:_SHOWN])}{more}: {by}"
