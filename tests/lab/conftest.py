"""Interrupts are heard in all tests of the lab."""

from command import heard

__all__ = ["heard"]
