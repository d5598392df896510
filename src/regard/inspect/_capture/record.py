"""The record that a capture returns, with files and pages."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Self

import torch

from regard.inspect._record.file import load_record, save_record
from regard.inspect._record.recording import Recording
from regard.inspect._view.page import render_html, save_html

#: The largest record that a notebook shows, in bytes.
_SHOWN = 32 << 20


class Record(Recording):
    """What a model attended to, layer by layer; made by :func:`regard.inspect.capture`.

    ``record[layer]`` is the latest run of a layer, by its name or the number that pages show; ``record[layer, 0]`` is
    its first run.

    Attributes
    ----------
    layers : tuple of str
        The names of the layers that were recorded, in the order of their first calls.
    labels : tuple of str
        The numbers of the layers that pages show.
    coverage : Coverage
        What was recorded and what was missed; set when the block of the capture ends.
    model : str
        The class of the model, if there is one.
    title : str
        The heading of pictures and pages.
    texts : tuple of Text
        The text that was read, or the texts that were read and written; set by :meth:`describe`.
    sequence : int
        Which sequence of the batch has these texts; others are shown with numbers instead of tokens.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture
    >>> model = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> with capture(model) as record:
    ...     out, _ = model(x, x, x)
    >>> record[0].weights(head=2).shape
    torch.Size([1, 5, 5])
    """

    def save(self, path: str | Path) -> Path:
        """Write the record to a file, which :meth:`load` and ``regard view`` read."""
        return save_record(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the record in a file.

        Raises
        ------
        ValueError
            If the file is not a record, is damaged, or has an unknown version.
        """
        made = cls({}, torch.float32)
        made._runs, made.texts, made.title, made.sequence, made.model = load_record(path)
        return made

    def to_html(self, path: str | Path | None = None, *, batch: int = 0) -> str | Path:
        """Return a page that shows the record in one HTML file that works offline, or write it to ``path``.

        Raises
        ------
        ValueError
            If the record is empty, or too large for one file.
        """
        return render_html(self, batch=batch) if path is None else save_html(self, path, batch=batch)

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed frame; a sentence for an empty or large record."""
        if not self._runs or self.nbytes > _SHOWN:
            return escape(f"{self!r}; to_html(path) writes a page, and save(path) a file for regard view")
        page = escape(str(self.to_html()))
        size = 'width="100%" height="560" style="border: 1px solid #8884"'
        return f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{page}" {size}></iframe>'
