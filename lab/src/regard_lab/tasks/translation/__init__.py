"""Translation and other writing of sequences from sequences: metrics, runs and alignment."""

from regard_lab.generation.sequence_model import SequenceModel

__all__ = ["SequenceModel"]
