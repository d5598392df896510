"""Classification of texts and images: options, training, metrics, and trained classifiers."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.tasks.classification.classifiers import (
        ImageClassificationPipeline,
        LabelledTokens,
        TextClassifier,
        TokenLabeller,
    )
    from regard_lab.tasks.classification.options import (
        ClassificationOptions,
        ClassifierTrainingOptions,
        HeadOptions,
        ImageClassificationOptions,
        ImageTrainingOptions,
        LabelledImageOptions,
        LabelledOptions,
        LoRAOptions,
        TextTrainingOptions,
    )
    from regard_lab.tasks.classification.training import (
        ClassificationObjective,
        FineTuning,
        ImageTraining,
        classification_metrics,
    )
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.tasks.classification.classifiers": (
                "ImageClassificationPipeline LabelledTokens TextClassifier TokenLabeller"
            ),
            "regard_lab.tasks.classification.options": (
                "ClassificationOptions ClassifierTrainingOptions HeadOptions ImageClassificationOptions "
                "ImageTrainingOptions LabelledImageOptions LabelledOptions LoRAOptions TextTrainingOptions"
            ),
            "regard_lab.tasks.classification.training": (
                "ClassificationObjective FineTuning ImageTraining classification_metrics"
            ),
        },
    )

__all__ = [
    "ClassificationObjective",
    "ClassificationOptions",
    "ClassifierTrainingOptions",
    "FineTuning",
    "HeadOptions",
    "ImageClassificationOptions",
    "ImageClassificationPipeline",
    "ImageTraining",
    "ImageTrainingOptions",
    "LabelledImageOptions",
    "LabelledOptions",
    "LabelledTokens",
    "LoRAOptions",
    "TextClassifier",
    "TextTrainingOptions",
    "TokenLabeller",
    "classification_metrics",
]
