"""Tasks: their data, training and evaluation."""

from regard.tasks.pronunciation import Pronouncer, Pronunciation

__all__ = ["Pronouncer", "Pronunciation"]
