"""What a release needs: versions agree, workflows call make targets that there are, the citation file is valid."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import distributed_files
import pytest
import released_version
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_every_statement_of_the_version_agrees() -> None:
    assert len(set(released_version.versions().values())) == 1, released_version.versions()
    (version,) = set(released_version.versions().values())
    pin = re.search(
        r'"regard\[cli,plot\]==([\d.]+)\.\*"', (ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert pin is not None and version.startswith(f"{pin[1]}.")


def test_a_tag_that_is_not_the_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert released_version.main("v99.1.0") == 1
    assert "src/regard/__init__.py states" in capsys.readouterr().out


def steps(workflow: Path) -> list[dict[str, object]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job.get("steps", [])]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_make_targets(workflow: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for step in steps(workflow):
        for line in str(step.get("run", "")).splitlines():
            if line.startswith("sudo apt-get"):
                continue
            command, target = line.split()[:2]
            assert command == "make" and (target == '"$TARGET"' or target in targets), line
    matrix = re.search(r"target: \[([^\]]+)\]", workflow.read_text(encoding="utf-8"))
    assert matrix is None or set(matrix[1].split(", ")) <= targets


def test_the_citation_is_valid() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(found)
    allowed = {
        "abstract",
        "authors",
        "cff-version",
        "keywords",
        "license",
        "message",
        "repository-code",
        "title",
        "type",
    }
    assert set(found) <= allowed | {"version", "date-released", "doi", "url"}
    assert all({"name"} == set(author) or {"family-names", "given-names"} <= set(author) for author in found["authors"])


def test_a_wheel_with_foreign_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "regard-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in distributed_files.NEEDED["regard-"]:
            wheel.writestr(f"info{name}" if name.startswith("/") else name, "")
        wheel.writestr("regard/tests/test_a.py", "")
    assert distributed_files.faults(path) == [f"{path.name} has regard/tests/test_a.py"]
    archive = tmp_path / "regard_lab-0.2.0.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        made.add(path, "regard_lab-0.2.0/src/__pycache__/a.pyc")
    assert distributed_files.faults(archive) == [f"{archive.name} has regard_lab-0.2.0/src/__pycache__/a.pyc"]
