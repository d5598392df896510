"""The page as a notebook widget, which loads data on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

from regard.inspect._record.recording import Recording
from regard.inspect._view.page import bundled, describe_page


class AttentionWidget(anywidget.AnyWidget):
    """The page of a record, or of two to compare, in a cell of a notebook.

    Parameters
    ----------
    shown : Record or sequence of Record
    batch : int
        Which sequence of a record's batch.

    Raises
    ------
    ValueError
        If there is nothing to show.
    """

    _esm = bundled("widget.js")
    _css = bundled("page.css")
    page = traitlets.Dict().tag(sync=True)

    def __init__(self, shown: Recording | Sequence[Recording], *, batch: int = 0) -> None:
        self._data = describe_page(shown, batch=batch)
        super().__init__(page=self._data.described | {"blocks": "served"})
        self.on_msg(self._answer)

    def _answer(self, _: Any, message: Any, __: Any) -> None:
        """Send a block that the page requests."""
        number = message.get("block") if isinstance(message, dict) else None
        if isinstance(number, int) and 0 <= number < len(self._data.blocks):
            self.send({"block": number}, buffers=[self._data.blocks[number]()])
