"""The command line, run in this process."""

from command import heard, regard

__all__ = ["heard", "regard"]
