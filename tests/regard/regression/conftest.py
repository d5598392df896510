"""What tests of kernel regression share."""

import warnings
from collections.abc import Iterator

import pytest

from regard._utils.errors import RegardWarning


@pytest.fixture
def quiet() -> Iterator[None]:
    """Ignore the library's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegardWarning)
        yield
