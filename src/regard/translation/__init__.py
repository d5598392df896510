"""Sequence to sequence: translation and pronunciation, their metrics, runs and comparison."""

from regard.decoding.sequence_model import SequenceModel
from regard.translation.pronunciation import Pronouncer

__all__ = ["Pronouncer", "SequenceModel"]
