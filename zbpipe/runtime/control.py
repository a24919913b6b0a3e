"""Errors between ranks: what the board's first failure means to a user, on every rank."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, StageError, ZbpipeError


def error_of(failure: tuple[int, int, str, int, str, str]) -> ZbpipeError:
    """The exception for a board's failure: (rank, stage, kind, microbatch, cause, message).

    ConfigError where the input was wrong (cause "x"), else StageError naming what is known.
    """
    rank, stage, kind, microbatch, cause, message = failure
    if cause == "x":
        return ConfigError(f"rank {rank}: {message}")
    return StageError(
        message,
        rank=rank,
        stage=None if stage < 0 else stage,
        action=None if kind == "-" else kind,
        microbatch=None if microbatch < 0 else microbatch,
    )


def describe(error: BaseException) -> str:
    """One line for another rank: the type and what it says."""
    return f"{type(error).__name__}: {error}"


def cause_of(error: BaseException) -> str:
    """The board's letter for an exception that a callback raised."""
    return "x" if isinstance(error, ConfigError) else "r"


def abort(board: Any, rank: int, error: BaseException, action: Any = None) -> None:
    """Tell every rank of `error`; `action` is the Action in which it came up, if in one."""
    message = str(error) if isinstance(error, ConfigError) else describe(error)
    if action is None:
        board.abort(rank, cause=cause_of(error), message=message)
    else:
        board.abort(rank, action.stage, action.kind, action.microbatch, cause_of(error), message)
