"""A record in a notebook whose page fetches what is looked at; anywidget is imported when one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from regard.inspect._record.recording import Recording

if TYPE_CHECKING:
    from regard.inspect._view.widget import AttentionWidget


def widget(shown: Recording | Sequence[Recording], *, batch: int = 0) -> AttentionWidget:
    """Return the page of a record, or of two to compare, as a widget of a notebook, however large the record is.

    Parameters
    ----------
    shown : Record or sequence of Record
    batch : int
        Which sequence of a record's batch.

    Raises
    ------
    ValueError
        If there is nothing to show.
    ModuleNotFoundError
        If anywidget is missing.
    """
    try:
        from regard.inspect._view.widget import AttentionWidget
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"regard.inspect.widget needs {error.name}, which is missing: pip install 'regard[notebook]'",
            name=error.name,
        ) from error
    return AttentionWidget(shown, batch=batch)
