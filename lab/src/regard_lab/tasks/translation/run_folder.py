"""The folder of a run on pairs: what any run has, and the vocabularies."""

from __future__ import annotations

import json
from pathlib import Path

from regard._utils.files import write_atomically
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.text.vocabulary import Vocabulary
from regard_lab.training.run_folder import RunFolder

SOURCE, TARGET = "source.json", "target.json"


class PairRunFolder(RunFolder[ExperimentOptions]):
    """The files of a run on pairs.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, ExperimentOptions)

    def read_vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        """Return the vocabularies that the run began with."""
        read = (Vocabulary.from_json(self.read_table(name), str(self.path / name)) for name in (SOURCE, TARGET))
        source, target = read
        return source, target

    def write_vocabularies(self, source: Vocabulary, target: Vocabulary) -> None:
        """Write the vocabularies of a new run."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, vocabulary in ((SOURCE, source), (TARGET, target)):
            write_atomically(self.path / name, json.dumps(vocabulary.to_json(), ensure_ascii=False).encode())
