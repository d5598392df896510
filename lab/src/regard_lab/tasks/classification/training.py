"""Training of classifiers: metrics, objective and the run that texts and images share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.errors import rejected
from regard_lab.data.labelled import Labelled, split_labelled
from regard_lab.tasks.classification.options import ClassifierOptions
from regard_lab.training.objectives import Loss, Objective
from regard_lab.training.run import FolderRun, RunFolder, place, restore_conditions, save_unbroken

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from regard_lab.training.loop import TrainingResult
    from regard_lab.training.objectives import Examples


# How well labels are named: accuracy, F1 and Matthews' correlation, of a matrix of counts -----------------------------


def classification_metrics(confusion: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """Return accuracy, F1 and Matthews' correlation coefficient, by scikit-learn.

    Parameters
    ----------
    confusion : ndarray (C, C)
        How often each label, in rows, was named each label, in columns.
    labels : sequence of C str

    Returns
    -------
    dict
        ``accuracy``; ``f1``, the mean of all labels that occur (macro F1); of two labels also ``f1_positive``, that of
        the second; ``matthews`` (Matthews 1975; of more labels Gorodkin 2004), 0 where one label alone was named.

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


# What classifiers learn: the label of each example --------------------------------------------------------------------
# Dimensions: B batch, C labels.


class LabelledBatch(Protocol):
    """A batch of examples with labels."""

    @property
    def labels(self) -> Tensor:
        """The number of each example's label, (B,)."""

    @property
    def targets(self) -> Tensor:
        """What is learned: those numbers, or probabilities of labels (B, C)."""

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits (B, C) that a classifier makes of the examples."""


class ClassificationObjective(Objective):
    """Name the label of each example: the cross-entropy of labels.

    Parameters
    ----------
    labels : sequence of C str
    smoothing : float, default 0.0
        The share of the probability that goes to all labels alike, in training.
    """

    def __init__(self, labels: Sequence[str], smoothing: float = 0.0) -> None:
        self.labels, self.smoothing = tuple(labels), smoothing

    def loss(self, model: nn.Module, batch: LabelledBatch) -> Loss:
        logits = batch.logits(model).float()
        value = F.cross_entropy(logits, batch.targets, label_smoothing=self.smoothing)
        return Loss(value, float(value.detach()), len(logits))

    def validation(self, model: nn.Module, batch: LabelledBatch) -> Tensor:
        """Return the sum of the costs, the count, and how often each label was named each, (2 + C²,)."""
        logits = batch.logits(model).double()
        cost, C = F.cross_entropy(logits, batch.labels, reduction="sum"), len(self.labels)
        named = torch.bincount(C * batch.labels + logits.argmax(1), minlength=C * C)
        return torch.cat([cost.view(1), cost.new_tensor([len(logits)]), named.double()])

    def metrics(self, loss: float, counts: Sequence[float] = ()) -> dict[str, float]:  # noqa: ARG002
        C = len(self.labels)
        return classification_metrics(np.array(counts).round().astype(np.int64).reshape(C, C), self.labels)


# From examples with labels to a classifier in a folder, where what a run was asked for is kept, to go on with it ------


class Classifier(Protocol):
    """A model with what it needs to read examples, as a folder holds them."""

    def save(self, folder: str | Path) -> None:
        """Write it to a folder."""


class TrainingBatches(Protocol):
    """Batches to learn from, any one at any time."""

    @property
    def per_epoch(self) -> int:
        """How many batches an epoch has."""

    def batch(self, number: int) -> Any:
        """Return the batch of this number."""


_O = TypeVar("_O", bound=ClassifierOptions)
_L = TypeVar("_L", bound=Labelled)
_C = TypeVar("_C", bound=Classifier)


@dataclass(frozen=True)
class Prepared(Generic[_C]):
    """What a run trains.

    Attributes
    ----------
    model : Module
    batches : TrainingBatches
    checks : sequence of batches
        To validate with.
    rate : float
        The learning rate that suits the model.
    finish : callable
        Returns the classifier, when the model is trained.
    begin : callable
        Writes to the folder, before training, what :meth:`ClassificationRun.prepare` needs to resume.
    """

    model: nn.Module
    batches: TrainingBatches
    checks: Sequence[Examples]
    rate: float
    finish: Callable[[], _C]
    begin: Callable[[], object] = lambda: None


class ClassificationRun(FolderRun[_O], Generic[_O, _L, _C]):
    """A run that learns labels, in a folder; parameters as :class:`FolderRun` has them."""

    #: The type of the options.
    kind: ClassVar[type[Any]]

    @classmethod
    def files(cls, folder: str | Path) -> RunFolder[_O]:
        return RunFolder(Path(folder), cls.kind)

    @abstractmethod
    def read(self, source: str, function: str = "train") -> _L:
        """Return the examples of a file or folder."""

    @abstractmethod
    def sources(self) -> tuple[str, str, float]:
        """Return where examples to learn from and to validate with come from, and else the share that is held out."""

    @abstractmethod
    def prepare(self, learn: _L, valid: _L, names: list[str], resume: bool) -> Prepared[_C]:
        """Return the model and its batches."""

    def objective(self, names: list[str]) -> ClassificationObjective:
        """Return what is learned."""
        return ClassificationObjective(names, self.options.training.label_smoothing)

    def train(self, *, resume: bool = False, callbacks: Iterable[Callback] = ()) -> tuple[_C, TrainingResult]:
        """Read the examples, train, and save the classifier to the folder.

        Raises
        ------
        ValueError
            If a file or an option is wrong, or the folder holds another run.
        TrainingError
            If training cannot go on.
        """
        from regard_lab.training.learner import Learner, Stream
        from regard_lab.training.loop import train

        files, here = self.open(resume)
        learn, valid = self._examples(report=not resume)
        record = {"data": learn.checksum(), "valid": valid.checksum(), **here}
        names = learn.names()
        if len(names) < 2:
            raise rejected("train", learn.name, "have two labels or more", f"one: {names[0]!r}, of all {learn.noun}s")
        valid.numbers(names)  # raises for labels that are not learned
        if resume:
            self._check(files.read_record(), record, learn.noun)
        elif place()[0]:
            files.wait_for_record()
        made = self.prepare(learn, valid, names, resume)
        planned = self.options.training.planned(made.batches.per_epoch, made.rate)
        self.options = self.options.with_changes({"training": planned})
        training = self.options.training
        self.say(
            f"{training.steps:,} steps, {made.batches.per_epoch:,} batches an epoch, rate {training.learning_rate:.3g}"
        )
        if place()[0] == 0:
            if not resume:
                made.begin()
            files.write(files.read_record() if resume else record, self.options)
        learner = Learner(made.model, training, Stream(made.batches.batch), self.objective(names))
        ended = train(learner, made.checks, training, self.folder, resume=resume, callbacks=callbacks)
        classifier = made.finish()
        if ended.reason != "interrupt" and place()[0] == 0:
            save_unbroken(lambda: classifier.save(self.folder), self.folder)
        if training.metric == "accuracy" and ended.best <= valid.majority()[1]:
            self.say("It is right no more often than naming the most frequent label would be.")
        return classifier, ended

    def _examples(self, report: bool) -> tuple[_L, _L]:
        """Return the examples to learn from, and those to validate with."""
        source, other, share = self.sources()
        learn = self.read(source)
        self._report(learn, report)
        if other:
            valid = self.read(other)
            self._report(valid, report)
            return learn, valid
        learn, valid = split_labelled(learn, share, seed=self.options.training.seed)
        if report:
            self.say(f"held out: {len(valid):,} {learn.noun}s")
        return learn, valid

    def _report(self, examples: Labelled, report: bool) -> None:
        for line in examples.report() if report else ():
            self.say(line)

    def _check(self, begun: dict[str, Any], record: dict[str, Any], noun: str) -> None:
        """Raise where the examples are not those that the run began with; go on under its conditions."""
        for name in ("data", "valid"):
            if begun[name] != record[name]:
                changed = name if self.sources()[1] else "data"  # of which some were held out
                raise rejected("resume", changed, f"be the {noun}s that the run began with", "others")
        restore_conditions(begun, record, self.say)
