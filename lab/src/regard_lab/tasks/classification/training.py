"""Training of classifiers of texts and images: metrics, objective, adversarial training, and the runs."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.errors import RegardWarning, rejected
from regard_lab.data.batches import Augmentation, ImageBatches, LabelBatches
from regard_lab.data.images import Preprocessing
from regard_lab.data.labelled import (
    SIDE,
    Labelled,
    LabelledImages,
    LabelledTexts,
    read_labelled,
    read_labelled_images,
    split_labelled,
)
from regard_lab.models import DecoderLM, EncoderLM, ImageClassifier, ResNet, SequenceClassifier, VisionTransformer, load
from regard_lab.models.heads import Head
from regard_lab.models.lora import add_lora, merge_lora
from regard_lab.tasks.classification.classifiers import (
    ImageClassificationPipeline,
    TextClassifier,
    bare,
    input_layout,
    readable_length,
    surrounded,
)
from regard_lab.tasks.classification.options import (
    IMAGE_MODELS,
    ClassificationOptions,
    ClassifierOptions,
    HeadOptions,
    ImageClassificationOptions,
)
from regard_lab.tasks.folders import check_tokenizer
from regard_lab.tasks.language.options import KINDS, SIZED, TOKENIZERS
from regard_lab.text.inputs import Inputs
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.unknown import check_unknown
from regard_lab.training.objectives import Loss, Objective
from regard_lab.training.run import FolderRun, place, restore_conditions, save_unbroken

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard_lab.training.loop import TrainingResult
    from regard_lab.training.objectives import Examples


# Training of classifiers: metrics, objective, and the training run shared by texts and images -------------------------


# Metrics --------------------------------------------------------------------------------------------------------------


def classification_metrics(confusion: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """Return accuracy, F1 and Matthews correlation coefficient, computed by scikit-learn.

    Parameters
    ----------
    confusion : ndarray (C, C)
        Confusion matrix: rows are true labels, columns predicted labels.
    labels : sequence of C str

    Returns
    -------
    dict
        ``accuracy``; ``f1``, the macro average over labels that occur; ``f1_positive`` of the second label if there are
        two; ``matthews`` (Matthews 1975; for more labels Gorodkin 2004), 0 if all predictions are the same label.

    Examples
    --------
    >>> metrics = classification_metrics(np.array([[3, 1], [0, 2]]), ["no", "yes"])
    >>> {name: round(value, 3) for name, value in metrics.items()}
    {'accuracy': 0.833, 'f1': 0.829, 'f1_positive': 0.8, 'matthews': 0.707}
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    true, named = confusion.nonzero()
    counts = confusion[true, named]
    if not counts.sum():
        return {}
    metrics = {"accuracy": float(np.diag(confusion).sum() / counts.sum())}
    weighed = {"sample_weight": counts, "zero_division": 0.0}
    metrics["f1"] = float(f1_score(true, named, average="macro", **weighed))
    if len(labels) == 2:
        metrics["f1_positive"] = float(f1_score(true, named, pos_label=1, labels=[0, 1], average="binary", **weighed))
    metrics["matthews"] = float(matthews_corrcoef(true, named, sample_weight=counts))
    return metrics


# Objective ------------------------------------------------------------------------------------------------------------
# Dimensions: B batch, C labels.


class LabelledBatch(Protocol):
    """A batch of examples with labels."""

    @property
    def labels(self) -> Tensor:
        """The label ids, (B,)."""

    @property
    def targets(self) -> Tensor:
        """The training targets: label ids (B,), or label probabilities (B, C)."""

    def logits(self, model: nn.Module) -> Tensor:
        """Return a classifier's logits (B, C) for the examples."""


class ClassificationObjective(Objective):
    """Cross-entropy of labels.

    Parameters
    ----------
    labels : sequence of C str
    smoothing : float, default 0.0
        Label smoothing in training.
    """

    def __init__(self, labels: Sequence[str], smoothing: float = 0.0) -> None:
        self.labels, self.smoothing = tuple(labels), smoothing

    def loss(self, model: nn.Module, batch: LabelledBatch) -> Loss:
        logits = batch.logits(model).float()
        value = F.cross_entropy(logits, batch.targets, label_smoothing=self.smoothing)
        return Loss(value, float(value.detach()), len(logits))

    def validation(self, model: nn.Module, batch: LabelledBatch) -> Tensor:
        """Return the sum of the losses, the count, and the flattened confusion matrix, (2 + C²,)."""
        logits = batch.logits(model).double()
        cost, C = F.cross_entropy(logits, batch.labels, reduction="sum"), len(self.labels)
        named = torch.bincount(C * batch.labels + logits.argmax(1), minlength=C * C)
        return torch.cat([cost.view(1), cost.new_tensor([len(logits)]), named.double()])

    def metrics(self, loss: float, counts: Sequence[float] = ()) -> dict[str, float]:  # noqa: ARG002
        C = len(self.labels)
        return classification_metrics(np.array(counts).round().astype(np.int64).reshape(C, C), self.labels)


# The run --------------------------------------------------------------------------------------------------------------


class Classifier(Protocol):
    """A model with its preprocessing, which can be saved to a folder."""

    def save(self, folder: str | Path) -> None:
        """Write it to a folder."""


class TrainingBatches(Protocol):
    """Training batches with random access."""

    @property
    def per_epoch(self) -> int:
        """The number of batches per epoch."""

    def batch(self, number: int) -> Any:
        """Return batch ``number``."""


_O = TypeVar("_O", bound=ClassifierOptions)
_L = TypeVar("_L", bound=Labelled)
_C = TypeVar("_C", bound=Classifier)


@dataclass(frozen=True)
class Prepared(Generic[_C]):
    """A model and its batches, ready to train.

    Attributes
    ----------
    model : Module
    batches : TrainingBatches
    checks : sequence of batches
        Validation batches.
    rate : float
        Default learning rate of the model.
    finish : callable
        Called after training; returns the classifier.
    begin : callable
        Called before training; writes to the folder what :meth:`ClassificationRun.prepare` needs to resume.
    """

    model: nn.Module
    batches: TrainingBatches
    checks: Sequence[Examples]
    rate: float
    finish: Callable[[], _C]
    begin: Callable[[], object] = lambda: None


class ClassificationRun(FolderRun[_O], Generic[_O, _L, _C]):
    """A training run of a classifier; parameters as in :class:`FolderRun`."""

    @abstractmethod
    def read(self, source: str, function: str = "train") -> _L:
        """Return the examples of a file or folder."""

    @abstractmethod
    def sources(self) -> tuple[str, str, float]:
        """Return the sources of training and validation examples, and the share to hold out without the latter."""

    @abstractmethod
    def prepare(self, learn: _L, valid: _L, names: list[str], resume: bool) -> Prepared[_C]:
        """Return the model and its batches."""

    def objective(self, names: list[str]) -> ClassificationObjective:
        """Return the training objective."""
        return ClassificationObjective(names, self.options.training.label_smoothing)

    def train(self, *, resume: bool = False, callbacks: Iterable[Callback] = ()) -> tuple[_C, TrainingResult]:
        """Read the examples, train, and save the classifier to the folder.

        Raises
        ------
        ValueError
            If a file or an option is invalid, or the folder holds another run.
        TrainingError
            If training fails.
        """
        files, here = self.open(resume)
        learn, valid = self._examples(report=not resume)
        record = {"data": learn.checksum(), "valid": valid.checksum(), **here}
        names = learn.names()
        if len(names) < 2:
            raise rejected("train", learn.name, "have at least two labels", f"only {names[0]!r}")
        valid.numbers(names)  # raises for unknown labels
        if resume:
            self._check(files.read_record(), record, learn.noun)
        elif place()[0]:
            files.wait_for_record()
        self.size_batches(len(learn), f"{learn.noun}s")
        made = self.prepare(learn, valid, names, resume)
        planned = self.options.training.planned(made.batches.per_epoch, made.rate)
        self.options = self.options.with_changes({"training": planned})
        training = self.options.training
        self.say(
            f"{training.steps:,} steps, {made.batches.per_epoch:,} batches per epoch, learning rate "
            f"{training.learning_rate:.3g}"
        )
        if place()[0] == 0:
            if not resume:
                made.begin()
            files.write(files.read_record() if resume else record, self.options)
        ended = self.fit(
            made.model, made.batches.batch, made.checks, self.objective(names), resume=resume, callbacks=callbacks
        )
        classifier = made.finish()
        if ended.reason != "interrupt" and place()[0] == 0:
            save_unbroken(lambda: classifier.save(self.folder), self.folder)
        if training.metric == "accuracy" and ended.best <= valid.majority()[1]:
            self.say("The accuracy is no better than always predicting the most frequent label.")
        return classifier, ended

    def _examples(self, report: bool) -> tuple[_L, _L]:
        """Return the training and validation examples."""
        source, other, share = self.sources()
        learn = self.read(source)
        self._report(learn, report)
        if other:
            valid = self.read(other)
            self._report(valid, report)
            return learn, valid
        learn, valid = split_labelled(learn, share, seed=self.options.training.seed)
        if report:
            self.say(f"held out for validation: {len(valid):,} {learn.noun}s")
        return learn, valid

    def _report(self, examples: Labelled, report: bool) -> None:
        for line in examples.report() if report else ():
            self.say(line)

    def _check(self, begun: dict[str, Any], record: dict[str, Any], noun: str) -> None:
        """Raise if the examples differ from the original run's; restore its conditions."""
        for name in ("data", "valid"):
            if begun[name] != record[name]:
                changed = name if self.sources()[1] else "data"  # the validation data is held out from it
                raise rejected("resume", changed, f"be the {noun}s of the original run", "others")
        restore_conditions(begun, record, self.say)


# Training of text classifiers, with optional adversarial training -----------------------------------------------------
# Dimensions: B batch, L tokens, W width of their vectors.


# Adversarial training: also learn each text's label at embeddings shifted in the direction that raises the loss most


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
            self.options.model_config()

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
        if not resume:
            self._check_unknown(learn, tokenizer, inputs[0], self.options.data.max_unknown)
            self._check_unknown(valid, tokenizer, inputs[1], 1.0)

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

    def _check_unknown(self, texts: LabelledTexts, tokenizer: Tokenizer, inputs: Inputs, most: float) -> None:
        """Report the symbols of texts that the tokenizer lacks; raise if they are a larger share."""
        tokens, keys = inputs.tokens, texts.keys()
        lines = check_unknown(
            "texts", tokenizer, [tokens.numbers], tokens.offsets[1:], lambda row: (texts.place(row), keys[row]), most
        )
        for line in lines:
            self.say(line)

    def _batches(self, inputs: Inputs, labels: Any) -> LabelBatches:
        training = self.options.training
        rank, world = place()
        return LabelBatches(inputs, labels, size=training.batch_examples, seed=training.seed, rank=rank, world=world)


# Training of image classifiers ----------------------------------------------------------------------------------------


class ImageTraining(ClassificationRun[ImageClassificationOptions, LabelledImages, ImageClassificationPipeline]):
    """A run in a folder that learns labels of images; parameters as :class:`ClassificationRun` has them."""

    kind = ImageClassificationOptions

    def __init__(
        self, options: ImageClassificationOptions, folder: str | Path, say: Callable[[str], None] = print
    ) -> None:
        super().__init__(options, folder, say)
        #: The preprocessing of images; None until it is known.
        self._preprocessing = self._asked()
        self._valid: LabelledImages | None = None

    def check(self) -> None:
        if not self.options.start:
            self.options.model_config()

    def sources(self) -> tuple[str, str, float]:
        data = self.options.data
        if not data.images:
            raise rejected("train", "images", "be given: a folder with one for each label, or arrays", "none")
        return data.images, data.valid, data.held_out

    def read(self, source: str, function: str = "train") -> LabelledImages:
        images = read_labelled_images(source, self._preprocessing, function=function)
        if self._preprocessing is None:  # arrays are used unchanged, and so are those for validation
            height, width, channels = images.pixels.shape[1:]
            if height != width:
                got = f"{height} × {width}"
                raise rejected(function, source, "have square images, or be made so by data.side", got)
            self._preprocessing = Preprocessing(height, (height, width), (0.5,) * channels, (0.5,) * channels)
        return images

    def prepare(
        self,
        learn: LabelledImages,
        valid: LabelledImages,
        names: list[str],
        resume: bool,  # noqa: ARG002
    ) -> Prepared[ImageClassificationPipeline]:
        assert self._preprocessing is not None
        self._valid = valid
        how = self._preprocessing if self.options.start else self._preprocessing.with_statistics(learn.pixels)
        how = replace(how, flip_test=how.flip_test or self.options.flip_test)
        torch.manual_seed(self.options.training.seed)
        model = self._model(how, names)
        kind = "vision transformer" if isinstance(model.model, VisionTransformer) else "residual network"
        counts = [(each.numel(), each.requires_grad) for each in model.parameters()]
        learned, count = sum(n for n, learns in counts if learns), sum(n for n, _ in counts)
        which = "" if learned == count else f", of which {learned:,} learn"
        self.say(f"{kind}, {count:,} parameters{which}; images of {how.shape[0]} × {how.shape[1]} pixels")
        return Prepared(
            model,
            self._batches(learn, names, how, self.options.augmentation),
            self._batches(valid, names, how, None).once,
            self.options.suitable_rate(model.model),
            lambda: ImageClassificationPipeline(model.eval(), how),
        )

    def scores(self, made: ImageClassificationPipeline) -> dict[str, float]:
        """Return the accuracy and the F1 of a classifier on the images that the training validated with."""
        assert self._valid is not None, "there are some when it was trained"
        true, K = self._valid.numbers(made.labels), len(made.labels)
        named = made.probabilities(self._valid.pixels).argmax(1).numpy()
        measures = classification_metrics(np.bincount(K * true + named, minlength=K * K).reshape(K, K), made.labels)
        return {name: measures[name] for name in ("accuracy", "f1")}

    def _asked(self) -> Preprocessing | None:
        """Return how images are read where the options say it."""
        options = self.options
        if options.start:
            return Preprocessing.load(options.start)
        arrays = Path(options.data.images).is_file() and ".tar" not in options.data.images.lower()
        if not options.data.side and not options.data.gray and arrays:
            return None
        side, middle = options.data.side or SIDE, (0.5,) * (1 if options.data.gray else 3)
        return Preprocessing(side, (side, side), middle, middle)

    def _model(self, how: Preprocessing, names: list[str]) -> ImageClassifier:
        """Return the classifier to train."""
        options = self.options
        if not options.start:
            config = options.model_config(how.shape[0], how.channels)
            return ImageClassifier(IMAGE_MODELS[options.kind][1](config), names, options.dropout).train()
        loaded = load(options.start, dtype=torch.float32, hosted=False)
        trunk = loaded.model if isinstance(loaded, ImageClassifier) else loaded
        if not isinstance(trunk, VisionTransformer | ResNet):
            raise rejected("train", options.start, "be the folder of a model of images", type(loaded).__name__)
        model = ImageClassifier(trunk, names, options.dropout)
        if isinstance(loaded, ImageClassifier) and loaded.labels == model.labels:
            model.output.load_state_dict(loaded.output.state_dict())
        if options.tune == "frozen":
            model.model.requires_grad_(False)
        return model.train()

    def _batches(
        self, images: LabelledImages, names: list[str], how: Preprocessing, augmentation: Augmentation | None
    ) -> ImageBatches:
        training = self.options.training
        rank, world = place()
        return ImageBatches(
            images.pixels, images.numbers(names), how, size=training.batch_examples, classes=len(names),
            augmentation=augmentation, seed=training.seed, rank=rank, world=world,
        )  # fmt: skip
