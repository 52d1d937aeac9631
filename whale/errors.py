"""The errors a user can meet. Each says what is wrong, both values, what is allowed, then `hint:`.

Place in the flow: below everything; every other module may raise these. A `ValueError` subclass is
the user's to fix, an `assert` anywhere else is a bug of ours.
"""

from __future__ import annotations


class WhaleError(ValueError):
    """Anything the user can fix. `hint` is the cure, printed on a line of its own."""

    def __init__(self, message: str, *, hint: str | None = None, where: str | None = None) -> None:
        self.message = message
        self.hint = hint
        self.where = where
        text = f"{where}: {message}" if where else message
        super().__init__(f"{text}\n  hint: {hint}" if hint else text)


class AnnotationError(WhaleError):
    """A primitive that cannot work where it was written; `where` is the user's file:line."""


class CaptureError(WhaleError):
    """The model cannot be captured, or its glue cannot be cut into stages."""


class ConfigError(WhaleError):
    """An unknown key or a value that is not allowed."""


class ClusterError(WhaleError):
    """A cluster description that cannot be read, or devices that are not there."""


class PlanError(WhaleError):
    """No plan exists for this model on these devices, or a plan does not belong to this model."""


class ScheduleError(WhaleError):
    """A schedule that would deadlock or lose work; the message carries the grid."""


class CheckpointError(WhaleError):
    """A checkpoint that is missing, damaged or from another model."""


class RankError(WhaleError):
    """A rank died, hung or disagreed; the message names it."""
