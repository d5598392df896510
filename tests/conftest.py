"""What must be set before anything is imported."""

from __future__ import annotations

import os

# scikit-learn's checks of other array libraries run only where SciPy was told of them before its first import.
os.environ.setdefault("SCIPY_ARRAY_API", "1")
