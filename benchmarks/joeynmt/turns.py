"""What a worker and who asks it say to each other: a line of JSON each way, over standard input and output.

Both environments import this file, so that it needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


class Turns:
    """A worker's side. What else is printed goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    def say(self, **found: Any) -> None:
        """Tell what was found."""
        self._out.write(json.dumps(found) + "\n")
        self._out.flush()

    def wait(self) -> dict[str, Any]:
        """Return what is asked next; where nothing will be, the process ends at once, whatever it was about to do."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        return json.loads(line)
