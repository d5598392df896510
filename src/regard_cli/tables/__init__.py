"""Kernel regression of tables: read a file, find out what its columns are, learn from its rows, predict, and write."""

from regard.regression._sums.evaluator import METHODS
from regard_cli.tables.columns import Coded, Column, typed
from regard_cli.tables.preparation import Prepared, prepare
from regard_cli.tables.quality import Quality, quality_of, quality_on
from regard_cli.tables.reading import Table, check_out, read, write
from regard_cli.tables.regression import Added, Fitted, added_names, code, fit, kept_bandwidth

__all__ = [
    "METHODS",
    "Added",
    "Coded",
    "Column",
    "Fitted",
    "Prepared",
    "Quality",
    "Table",
    "added_names",
    "check_out",
    "code",
    "fit",
    "kept_bandwidth",
    "prepare",
    "quality_of",
    "quality_on",
    "read",
    "typed",
    "write",
]
