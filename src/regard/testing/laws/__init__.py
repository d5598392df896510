"""The laws of the contract, each a function that takes a case and an engine. The table of them, and nothing else."""

from regard.testing.laws import accuracy, masking, parts, ragged, transforms, weighing
from regard.testing.laws.base import LAWS, Law, law

__all__ = ["LAWS", "Law", "accuracy", "law", "masking", "parts", "ragged", "transforms", "weighing"]
