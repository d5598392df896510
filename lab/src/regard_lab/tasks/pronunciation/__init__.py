"""Pronouncing words: letters in, phonemes out."""

from regard_lab.tasks.pronunciation.pronouncer import Pronouncer

__all__ = ["Pronouncer"]
