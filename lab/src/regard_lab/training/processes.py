"""What is said where one of several processes is lost."""

from __future__ import annotations

import torch.distributed as dist

from regard_lab.training.options import TrainingError

#: What backends say of a process that died, or does not answer; they have no type of error for it.
_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL")


class LostProcessError(TrainingError):
    """Another process died, or does not answer: the fault is not this one's."""


def lost_process(error: BaseException) -> LostProcessError | None:
    """Return what to raise in place of an error that says that another process is lost; None for other errors."""
    if isinstance(error, TrainingError) and not any(sign in str(error) for sign in _SIGNS):
        return None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    text = str(error)
    by_type = isinstance(error, getattr(dist, "DistError", ()))
    if not (by_type or any(sign in text for sign in _SIGNS) or "of the group died" in text):
        return None
    said = (text.splitlines() or [type(error).__name__])[0].split("] ", 1)[-1].split(". ")[0].rstrip(".")
    return LostProcessError(
        f"train: all processes must answer, got none from another one, which died or hangs ({said}); the last "
        "checkpoint is whole: see what ended that one, and go on with --resume."
    )
