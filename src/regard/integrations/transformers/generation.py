"""How models of transformers generate."""

from __future__ import annotations

from regard.integrations.transformers._interfaces import BEAM_SEARCH


def beam_search_name(mixin: type) -> str | None:
    """Return the name of the method that runs a beam search and says which beams its answers came by, if there is one.

    Examples
    --------
    >>> from transformers.generation import GenerationMixin
    >>> callable(getattr(GenerationMixin, beam_search_name(GenerationMixin)))
    True
    """
    return BEAM_SEARCH if BEAM_SEARCH in vars(mixin) else None
