"""The demo's answer as a table for the terminal, as JSON, and as a report."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..report import Entry, html
from .runner import Result, Results


def show(results: Results) -> None:
    """Print the table."""
    options = results.options
    table = Table(title=_title(results), title_justify="left")
    rows = {name: _cells(results, result) for name, result in results.schedules.items()}
    table.add_column("schedule")
    for heading in next(iter(rows.values())):
        table.add_column(heading, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells.values())
    # A pipe has no width of its own: 80 columns would fold every cell.
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
    if options.device == "virtual":
        print("virtual: sleeps in place of a model, run by the same executor; nothing is learned")


def _title(results: Results) -> str:
    options = results.options
    where = f"{options.stages} stages, {options.microbatches} microbatches"
    if options.device == "virtual":
        times = ", ".join(f"{t * 1e3:g}" for t in options.times)
        return f"VIRTUAL device (no model): {where}, F, I, W = {times} ms"
    return f"GPT of {results.parameters / 1e6:.1f} M parameters on CPU: {where}"


def _cells(results: Results, result: Result) -> dict[str, str]:
    cells = {
        "step time": f"{result.step_s:.3f} s",
        "bubble planned": f"{result.bubble_planned:.1%}",
        "bubble measured": f"{result.bubble_measured:.1%}",
    }
    if results.options.device == "virtual":
        return cells
    assert result.memory_planned is not None and result.memory_measured is not None
    planned, measured = result.memory_planned / 1e6, result.memory_measured / 1e6
    bitwise = "bitwise" if results.bitwise else "NO"
    return cells | {
        "peak activations planned / measured": f"{planned:.1f} / {measured:.1f} MB",
        "held-out loss": f"{result.loss_before:.3f} → {result.loss_after:.3f}",
        "gradients vs unsplit": f"{result.grad_max_diff:.1e}",
        "losses equal": bitwise if len(results.schedules) > 1 else "(one schedule)",
    }


def to_json(results: Results) -> dict[str, Any]:
    """The table as plain data: seconds, bytes, rates of the stage objective."""
    keys = (
        "step_s",
        "bubble_planned",
        "bubble_measured",
        "memory_planned",
        "memory_measured",
        "loss_before",
        "loss_after",
        "grad_max_diff",
        "losses",
    )
    return {
        "device": results.options.device,
        "stages": results.options.stages,
        "microbatches": results.options.microbatches,
        "schedules": {
            name: {key: getattr(result, key) for key in keys}
            for name, result in results.schedules.items()
        },
    }


def report(results: Results) -> str:
    """The HTML report: planned over measured timeline of the last step of each schedule."""
    notes = ["Bubbles are of the stage objective: idle ÷ the longest span of a rank."]
    if results.options.device == "virtual":
        notes.append("VIRTUAL device: sleeps in place of a model, run by the same executor.")
    else:
        notes.append("Timelines are of the last step, in which memory was counted.")
    entries = [
        Entry(name, result.plan.timeline, result.measured, _cells(results, result))
        for name, result in results.schedules.items()
    ]
    return html(f"zbpipe demo: {_title(results)}", entries, notes)
