"""Training of text classifiers, with optional adversarial training.

Dimensions: B batch, L tokens, W width of their vectors.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.errors import RegardWarning, rejected
from regard_lab.data.batches import LabelBatches
from regard_lab.data.labelled import LabelledTexts, read_labelled
from regard_lab.models import DecoderLM, EncoderLM, SequenceClassifier, load
from regard_lab.models.heads import Head
from regard_lab.models.lora import add_lora, merge_lora
from regard_lab.tasks.classification.text_options import ClassificationOptions, HeadOptions
from regard_lab.tasks.classification.texts import (
    TextClassifier,
    bare,
    input_layout,
    readable_length,
    surrounded,
)
from regard_lab.tasks.classification.training import ClassificationObjective, ClassificationRun, LabelledBatch, Prepared
from regard_lab.tasks.folders import check_tokenizer
from regard_lab.tasks.language.options import KINDS, SIZED, TOKENIZERS
from regard_lab.text.inputs import Inputs
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.training.objectives import Loss
from regard_lab.training.run import place

# Adversarial training of classifiers of texts: learn each text's label a step away from it, too, where it costs most


class AdversarialLabels(ClassificationObjective):
    """Cross-entropy of labels with adversarial training (Goodfellow 2015; Miyato 2017, arXiv 1605.07725).

    For a text with vectors x (L, W) and label y::

        g = ∇ₓ ℓ(x, y)        r = ε ‖x‖ g / ‖g‖        cost = (ℓ(x, y) + ℓ(x + r, y)) / 2

    r is treated as a constant, and norms are over all tokens of the text that affect the loss. The vectors x are the
    inputs of the filters, if the classifier has any, otherwise the token embeddings. From x on, a step takes two
    forward and three backward passes instead of one each. Validation is not affected.

    Parameters
    ----------
    labels : sequence of C str
    step : float
        ε, the length of r as a share of the length of x.
    smoothing : float, default 0.0
        As in :class:`~regard_lab.tasks.classification.training.ClassificationObjective`.
    """

    def __init__(self, labels: Sequence[str], step: float, smoothing: float = 0.0) -> None:
        super().__init__(labels, smoothing)
        self.step = step

    def loss(self, model: nn.Module, batch: LabelledBatch) -> Loss:
        assert isinstance(model, Head)
        filtered = isinstance(model, SequenceClassifier) and model.windows is not None
        moved = (_Filtered if filtered else _Embedded)(model)
        plain = super().loss(moved, batch)
        gradient = torch.autograd.grad(plain.value, moved.vectors, retain_graph=True)[0]
        moved.by = uphill(moved.vectors, gradient, self.step)
        worse = super().loss(moved, batch)
        return Loss((plain.value + worse.value) / 2, plain.shown, plain.count)


class _Moved(nn.Module, ABC):
    """A classifier that stores the vectors of a batch, and can run again with perturbed vectors."""

    model: Head
    vectors: Tensor
    by: Tensor | None = None

    def __init__(self, model: Head) -> None:
        super().__init__()
        self.model = model

    def see(self, vectors: Tensor) -> Tensor:
        """Store the vectors in the first pass; perturb them in the second."""
        if self.by is not None:
            return vectors + self.by.to(vectors.dtype)
        # If everything below is frozen, the vectors do not require a gradient yet.
        self.vectors = vectors if vectors.requires_grad else vectors.detach().requires_grad_()
        return self.vectors

    @abstractmethod
    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """Return the label logits."""


class _Filtered(_Moved):
    """Perturbs the inputs of the filters, which are computed only once."""

    model: SequenceClassifier
    attention_mask: Tensor | None = None

    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        if self.by is None:
            self.vectors, self.attention_mask = self.model.read(tokens, **inputs)
        return self.model.score(self.see(self.vectors), self.attention_mask)


class _Embedded(_Moved):
    """Perturbs the token embeddings."""

    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        hook = self.model.model.embedding.register_forward_hook(lambda *given: self.see(given[2]))
        try:
            return self.model(tokens, **inputs)
        finally:
            hook.remove()


def uphill(rows: Tensor, gradient: Tensor, step: float) -> Tensor:
    """Return the perturbation of each text's rows (B, L, W) along its gradient, of ``step`` times their norm.

    Rows without a gradient are padding and do not count. A text without gradients is not perturbed.

    Examples
    --------
    >>> rows, gradient = torch.tensor([[[3.0, 4.0], [9.0, 9.0]]]), torch.tensor([[[0.0, 2.0], [0.0, 0.0]]])
    >>> uphill(rows, gradient, 0.1).tolist()
    [[[0.0, 0.5], [0.0, 0.0]]]
    """
    rows, gradient = rows.detach().float(), gradient.float()
    counts = (gradient != 0).any(-1, keepdim=True)
    # Squares of small gradients may underflow.
    slope = gradient / gradient.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    length, steepness = (each.square().sum((1, 2), keepdim=True).sqrt() for each in (rows * counts, slope))
    return step * length * slope / steepness.clamp(min=1)  # one element is ±1, or all are 0


# The run --------------------------------------------------------------------------------------------------------------


class FineTuning(ClassificationRun[ClassificationOptions, LabelledTexts, TextClassifier]):
    """A training run of a text classifier; parameters as in :class:`ClassificationRun`."""

    kind = ClassificationOptions

    def check(self) -> None:
        if not self.options.start:
            self.options.model_config(1000)

    def sources(self) -> tuple[str, str, float]:
        data = self.options.data
        if not data.data:
            raise ValueError("train: --data is required: lines of text, tab, label.")
        return data.data, data.valid, data.held_out

    def read(self, source: str, function: str = "train") -> LabelledTexts:
        return read_labelled(source, pairs=self.options.data.pairs, function=function)

    def prepare(
        self, learn: LabelledTexts, valid: LabelledTexts, names: list[str], resume: bool
    ) -> Prepared[TextClassifier]:
        tokenizer = self._tokenizer(learn) if not resume and place()[0] == 0 else Tokenizer.load(self.folder)
        torch.manual_seed(self.options.training.seed)
        model, before = self._model(tokenizer, names)
        if before is None:  # an existing classifier keeps its special tokens
            tokenizer = surrounded(model.model, tokenizer)
        self._describe(model, tokenizer)
        length = self._length(model, say=not resume)
        inputs = self._inputs(learn, model, tokenizer, length), self._inputs(valid, model, tokenizer, length)

        def finish() -> TextClassifier:
            merge_lora(model)
            return TextClassifier(model.eval(), tokenizer, length)

        return Prepared(
            model,
            self._batches(inputs[0], learn.numbers(names)),
            list(self._batches(inputs[1], valid.numbers(names)).once()),
            self.options.suitable_rate(model.model),
            finish,
            begin=lambda: tokenizer.limited(length).save(self.folder),
        )

    def objective(self, names: list[str]) -> ClassificationObjective:
        training = self.options.training
        if not training.adversarial:
            return super().objective(names)
        return AdversarialLabels(names, training.adversarial, training.label_smoothing)

    def _tokenizer(self, learn: LabelledTexts) -> Tokenizer:
        """Return the start model's tokenizer, one from a folder, or a new one trained on the texts."""
        options = self.options.tokenizer
        if self.options.start:
            return Tokenizer.load(self.options.start)
        if options.kind not in TOKENIZERS:
            return Tokenizer.load(options.kind)
        specials = ("end", "pad", "mask", "cls", "sep") if self.options.kind == "encoder" else ("end", "pad")
        size = options.size if options.kind in SIZED else None
        texts = learn.texts + (learn.others or [])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RegardWarning)
            made = Tokenizer.learn(texts, size, options.kind, options.lowercase, specials=specials)
        for each in caught:
            self.say(str(each.message).partition(": ")[2])
        return made

    def _model(self, tokenizer: Tokenizer, names: list[str]) -> tuple[SequenceClassifier, Head | None]:
        """Return the classifier to train, with parameters frozen by the option ``tune``, and the start classifier."""
        options = self.options
        if not options.start:
            trunk = KINDS[options.kind][1](options.model_config(len(tokenizer)))
            return self._classifier(trunk, names, options.head).train(), None
        loaded = load(options.start, dtype=torch.float32, hosted=False)
        trunk = loaded.model if isinstance(loaded, Head) else loaded
        if not isinstance(trunk, EncoderLM | DecoderLM):
            raise rejected("train", options.start, "be the folder of a language model", type(loaded).__name__)
        check_tokenizer(trunk, tokenizer, "train", options.start)
        before = loaded if isinstance(loaded, SequenceClassifier) else None
        how = options.head
        if before is not None and how == HeadOptions() and before.filters:  # default options: keep the head
            how = HeadOptions(**before.filtering)
        trunk = bare(trunk, options.model, with_pooler=not how.filters)
        if before is not None and (before.filtering != how.filtering or before.problem != "single_label"):
            before = None  # the heads differ
        scored = before.output if before is not None and before.labels == tuple(names) else None
        model = self._classifier(trunk, names, how, bias=scored is None or scored.bias is not None)
        if before is not None and before.windows is not None and model.windows is not None:
            model.windows.load_state_dict(before.windows.state_dict())
        if scored is not None:
            model.output.load_state_dict(scored.state_dict())
        if options.tune in ("frozen", "embedding"):
            model.model.requires_grad_(False)
            model.model.embedding.requires_grad_(options.tune == "embedding")
        elif options.tune == "lora":
            if not trunk.blocks:
                raise rejected(
                    "train", "tune", "be 'full', 'embedding' or 'frozen' for a model without blocks", "'lora'"
                )
            add_lora(model.model, options.lora.rank, options.lora.alpha, dropout=options.lora.dropout)
        if isinstance(model.model, EncoderLM) and model.model.pooler is not None:
            model.model.pooler.requires_grad_(True)  # the pooler belongs to the head
        return model.train(), loaded if isinstance(loaded, Head) else None

    def _classifier(
        self, trunk: EncoderLM | DecoderLM, names: list[str], head: HeadOptions, *, bias: bool = True
    ) -> SequenceClassifier:
        dropout = head.dropout if head.filters else trunk.config.dropout
        if head.both_ways and not isinstance(trunk, DecoderLM):
            raise rejected("train", "head.both_ways", "be left out with an encoder, which sees both sides", True)
        return SequenceClassifier(trunk, names, dropout, bias=bias, **head.filtering)

    def _describe(self, model: SequenceClassifier, tokenizer: Tokenizer) -> None:
        kind = "decoder" if isinstance(model.model, DecoderLM) else "encoder"
        counts = [(each.numel(), each.requires_grad) for each in model.parameters()]
        learned, count = sum(n for n, learns in counts if learns), sum(n for n, _ in counts)
        which = "" if learned == count else f" ({learned:,} trainable)"
        self.say(f"{kind}, {count:,} parameters{which}, vocabulary size {len(tokenizer):,}")

    def _length(self, model: SequenceClassifier, say: bool) -> int:
        asked = self.options.data.length
        length = readable_length(model.model, asked)
        if length < asked and say:
            self.say(f"texts are truncated to {length:,} tokens, the number of learned positions")
        return length

    def _inputs(self, texts: LabelledTexts, model: SequenceClassifier, tokenizer: Tokenizer, length: int) -> Inputs:
        layout = input_layout(model.model, tokenizer)
        inputs = layout.read(tokenizer, texts.texts, texts.others, length=length)
        if cut := int(inputs.cut.sum()):
            self.say(f"{texts.name}: truncated {cut:,} of {len(texts):,} texts to {length:,} tokens")
        return inputs

    def _batches(self, inputs: Inputs, labels: Any) -> LabelBatches:
        training = self.options.training
        rank, world = place()
        return LabelBatches(inputs, labels, size=training.batch_examples, seed=training.seed, rank=rank, world=world)
