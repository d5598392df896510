"""Tasks: their data, training and evaluation."""

from regard.tasks.pronunciation import Pronouncer
from regard.tasks.sequences import SequenceModel

__all__ = ["Pronouncer", "SequenceModel"]
