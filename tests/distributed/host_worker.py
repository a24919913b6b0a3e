"""One rank of a job on hosts of its own: `python host_worker.py HOW RANK SIZE STORE OUT`.

Joins torch.distributed by MASTER_ADDR, or by the file STORE where that is not set; does what HOW
says and writes what came of it to OUT, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from hosting import python_threads

import zbpipe
from cases import WIDTH, mse, regression
from crews import lane_threads, shared_files

((X, Y),) = regression((8, WIDTH))
KEPT = []


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]


def wrapped(timeout: float = 20.0, transport: str | None = None) -> zbpipe.Pipeline:
    return zbpipe.wrap(layers(), 4, "zb1p", loss_fn=mse, timeout=timeout, transport=transport)


def trains_by_torch(out: Path) -> dict[str, object]:
    return trains(out, "torch")


def trains(out: Path, transport: str | None = None) -> dict[str, object]:
    """Two pipelines, one after the other; the losses and gradients of the second."""
    with_example = zbpipe.wrap(layers(), 4, "auto", loss_fn=mse, example=X)
    with_example.step(X, target=Y)
    with_example.close()
    pipe = wrapped(transport=transport)
    losses = [pipe.step(X, target=Y).item() for _ in range(3)]
    grads = {name: p.grad.tolist() for name, p in pipe.named_parameters() if p.grad is not None}
    summary = pipe.summary()
    pipe.close()
    assert lane_threads() == shared_files() == python_threads() == []
    return {"losses": losses, "grads": grads, "summary": summary}


def until_cut_by_torch(out: Path) -> dict[str, object]:
    return until_cut(out, "torch")


def until_cut(out: Path, transport: str | None = None) -> dict[str, object]:
    """Steps without end; `out` with .ready says that they have begun."""
    pipe = wrapped(3.0, transport)
    pipe.step(X, target=Y)
    out.with_suffix(".ready").touch()
    began = time.monotonic()
    while time.monotonic() - began < 90:  # hang guard
        pipe.step(X, target=Y)
        began = time.monotonic()
    return {}


def cut_between_steps(out: Path) -> dict[str, object]:
    """Closes the pipeline when the connection is gone, which nobody was told."""
    pipe = wrapped(timeout=3.0)
    pipe.step(X, target=Y)
    out.with_suffix(".ready").touch()
    while not out.with_suffix(".cut").exists():
        time.sleep(0.01)
    pipe.close()
    assert lane_threads() == shared_files() == python_threads() == []
    return {}


def ends_without_close(out: Path) -> dict[str, object]:
    pipe = wrapped()
    pipe.step(X, target=Y)
    KEPT.append(pipe)
    return {}


def ends_after_an_error(out: Path) -> dict[str, object]:
    pipe = wrapped()
    KEPT.append(pipe)
    pipe.step(X, target=Y)
    target = Y[:, :1] if dist.get_rank() == 0 else Y
    pipe.step(X, target=target)
    return {}


def main() -> None:
    how, rank, size, store, out = sys.argv[1:]
    torch.set_num_threads(1)
    method = "env://" if "MASTER_ADDR" in os.environ else f"file://{store}"
    dist.init_process_group("gloo", init_method=method, rank=int(rank), world_size=int(size))
    result: dict[str, object] = {}
    try:
        result = globals()[how](Path(out))
    except zbpipe.ZbpipeError as error:
        result = {"error": type(error).__name__, "message": str(error)}
        result["rank"] = getattr(error, "rank", None)
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
