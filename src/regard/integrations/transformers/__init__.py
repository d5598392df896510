"""Hugging Face models on :func:`regard.attention`.

>>> from regard.integrations import transformers
>>> transformers.register()

Then ``AutoModel.from_pretrained(folder, attn_implementation="regard")`` runs any model whose attention goes through
transformers' interface, and :func:`configure` gives its layers other scores, normalizers and masks.
"""

from regard.integrations.transformers.attention_function import register
from regard.integrations.transformers.configuration import Configured, attention_layers, configure

__all__ = ["Configured", "attention_layers", "configure", "register"]
