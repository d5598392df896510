"""Hugging Face models on :func:`regard.attention`.

>>> from regard.integrations import transformers
>>> transformers.register()

Then ``AutoModel.from_pretrained(folder, attn_implementation="regard")`` runs any model that uses transformers'
attention interface, and :func:`configure` sets other scores, normalizers and masks in its layers.
"""

from regard.integrations.transformers.attention_function import register
from regard.integrations.transformers.configuration import Configured, attention_layers, configure

__all__ = ["Configured", "attention_layers", "configure", "register"]
