"""The exceptions zbpipe raises; every one of them is a ZbpipeError."""


class ZbpipeError(RuntimeError):
    """Base of everything zbpipe raises on purpose."""


class ConfigError(ZbpipeError, ValueError):
    """An argument that cannot be right: the message names it, its value and what would be right."""


class ScheduleError(ZbpipeError, ValueError):
    """A schedule that is malformed, incomplete, out of order, or that would wait forever."""


class MemoryBudgetError(ZbpipeError):
    """No schedule, or not this one, fits the memory budget; the message says what would."""


class StageError(ZbpipeError):
    """A rank failed inside `step`: where, doing what, and why.

    `rank` is the failing rank, `stage` the stage it ran, `action` the letter (F, I, W or B) and
    `microbatch` the slice of the batch; the last three are None when the failure was outside them.
    """

    def __init__(
        self,
        cause: str,
        *,
        rank: int,
        stage: int | None = None,
        action: str | None = None,
        microbatch: int | None = None,
    ) -> None:
        where = [f"rank {rank}"]
        if stage is not None:
            where.append(f"stage {stage}")
        if action is not None and microbatch is not None:
            where.append(f"{action} of microbatch {microbatch}")
        elif action is not None:
            where.append(action)
        elif microbatch is not None:
            where.append(f"microbatch {microbatch}")
        super().__init__(f"{', '.join(where)}: {cause}")
        self.cause = cause
        self.rank = rank
        self.stage = stage
        self.action = action
        self.microbatch = microbatch

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by parts: errors travel between ranks, and keyword arguments are not in `args`."""
        return _stage_error, (self.cause, self.rank, self.stage, self.action, self.microbatch)


def _stage_error(
    cause: str, rank: int, stage: int | None, action: str | None, microbatch: int | None
) -> StageError:
    return StageError(cause, rank=rank, stage=stage, action=action, microbatch=microbatch)
