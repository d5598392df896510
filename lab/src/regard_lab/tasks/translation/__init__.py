"""Sequence to sequence: translation and pronunciation, their metrics, runs and comparison."""

from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.tasks.pronunciation.pronouncer import Pronouncer

__all__ = ["Pronouncer", "SequenceModel"]
