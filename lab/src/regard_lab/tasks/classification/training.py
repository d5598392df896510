"""Training of classifiers: metrics, objective, and the training run shared by texts and images."""

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
        from regard_lab.training.learner import Learner, Stream
        from regard_lab.training.loop import train

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
        learner = Learner(made.model, training, Stream(made.batches.batch), self.objective(names))
        ended = train(learner, made.checks, training, self.folder, resume=resume, callbacks=callbacks)
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
