"""Facts about the machine and the software versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
#: A load average from which on timings are not to be trusted.
BUSY = 0.5


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown"


def slug(text: str) -> str:
    """Return ``text`` as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-")


def facts() -> dict[str, str]:
    """Return the facts that a reader needs to interpret the numbers, by name."""
    return {
        "CPU": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "RAM": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "OS": _os(),
        "load average": _load(os.getloadavg()[0]),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "pykeops", "statsmodels")},
        "regard": f"{_version('regard')} ({_commit()})",
    }


def _load(average: float) -> str:
    busy = "; other programs were running, so times are noisy, most of all with many small kernels"
    return f"{average:.2f} at the start{busy if average > BUSY else ''}"


def _os() -> str:
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, kernel {platform.release()}"
    except (OSError, KeyError):
        return platform.platform()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _commit() -> str:
    try:
        changed = _git("status", "--porcelain", "--", "src")
        return f"commit {_git('rev-parse', '--short', 'HEAD')}{', with changes in src' if changed else ''}"
    except (OSError, subprocess.CalledProcessError):
        return "no git commit"
