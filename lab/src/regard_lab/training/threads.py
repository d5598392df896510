"""Set the number of torch's threads, or say that the machine cannot start so many."""

from __future__ import annotations

import threading

import torch

from regard._utils.errors import rejected


def set_threads(count: int) -> None:
    """Let torch use so many threads.

    Raises
    ------
    ValueError
        If the machine cannot start them: OpenMP would end the process.
    """
    most = _startable(count)
    if most < count:
        raise rejected("train", "training.threads", f"be at most {most:,}, all that can be started here", f"{count:,}")
    torch.set_num_threads(count)


def _startable(count: int) -> int:
    """Return how many threads of so many can be there at once."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count - 1):  # this one is there
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # what Python says where the system refuses one
        pass
    finally:
        end.set()
        for thread in started:
            thread.join()
    return len(started) + 1
