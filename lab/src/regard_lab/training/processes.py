"""Errors about lost processes in distributed training."""

from __future__ import annotations

import torch.distributed as dist

from regard_lab.training.options import TrainingError

#: Parts of the backends' messages about a dead or unresponsive process; they have no exception type for it.
_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL")


class LostProcessError(TrainingError):
    """Another process died or does not respond."""


def lost_process(error: BaseException) -> LostProcessError | None:
    """Return a :class:`LostProcessError` if an error says that another process is lost; None otherwise."""
    if isinstance(error, TrainingError) and not any(sign in str(error) for sign in _SIGNS):
        return None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    text = str(error)
    by_type = isinstance(error, getattr(dist, "DistError", ()))
    if not (by_type or any(sign in text for sign in _SIGNS) or "of the group died" in text):
        return None
    reason = (text.splitlines() or [type(error).__name__])[0].split("] ", 1)[-1].split(". ")[0].rstrip(".")
    return LostProcessError(
        f"train: another process died or hangs ({reason}). The last checkpoint is intact: check the output of that "
        "process, and continue with --resume."
    )
