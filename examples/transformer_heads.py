"""What a trained Transformer attends to.

The included English–French Transformer (Vaswani 2017) on the example of Bahdanau, Cho and Bengio (2014, figure 3). Each
picture is one head: rows look, columns are looked at; ⇧ marks a capital. Above, the encoder: a head that looks at the
previous token, one that looks at the next, and one without a single place. Below, a head of the decoder, which sees
only what is written; the head that looks at the English word just translated, along *zone économique européenne*
backwards; and one that looks at the word to translate next.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from regard.inspect import capture
from regard_lab import pretrained
from regard_lab.models import END

SENTENCE = "The agreement on the European Economic Area was signed in August 1992."
#: Module, head, and what is seen there.
HEADS = (
    ("encoder.2.self_attn", 3, "encoder: the previous token"),
    ("encoder.1.self_attn", 3, "encoder: the next token"),
    ("encoder.4.self_attn", 2, "encoder: many tokens"),
    ("decoder.0.self_attn", 1, "decoder: what is written"),
    ("decoder.0.multihead_attn", 0, "cross-attention: the word just translated"),
    ("decoder.0.multihead_attn", 3, "cross-attention: the word to translate next"),
)


def draw() -> Figure:
    """Translate, record, and draw six heads."""
    translator = pretrained.load()
    (prediction,) = translator.predict([SENTENCE])
    (source, name_source), (target, name_target) = translator.tokenize_pair(SENTENCE, prediction.text)
    read, written = torch.tensor([source]), torch.tensor([[END, *target]])
    with capture(translator.model) as record, torch.no_grad():
        translator.model.features(read, torch.tensor([len(source)]), written)
    across = [each.strip("▁ ") for each in name_source(source)]
    down = ["start", *(each.strip("▁ ") for each in name_target(target))]
    figure, axes = plt.subplots(2, 3, figsize=(13, 8.6), layout="constrained")
    for (module, head, title), axis in zip(HEADS, axes.flat):
        queries = across if module.startswith("encoder") else down
        keys = down if module.startswith("decoder") and module.endswith("self_attn") else across
        image = axis.imshow(record[module].weights(batch=0, head=head).numpy(), cmap="Blues", vmin=0, vmax=1)
        axis.set_xticks(range(len(keys)), keys, rotation=60, ha="left", rotation_mode="anchor", fontsize=8)
        axis.set_yticks(range(len(queries)), queries, fontsize=8)
        axis.tick_params(length=0, top=True, labeltop=True, labelbottom=False)
        axis.set_xlabel(title, fontsize=11)
    for axis in axes[:, 0]:
        axis.set_ylabel("token that looks")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.6)
    figure.suptitle(f"{SENTENCE}   →   {prediction.text}")
    return figure


if __name__ == "__main__":
    draw()
    plt.show()
