"""What a release needs agrees: versions, the typing marker, the workflow, the commit hook."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


def project() -> dict[str, str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_has_the_version_and_the_license_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project()["version"]
    assert citation["license"] == project()["license"]
    assert citation["title"] == project()["name"]


def test_the_changelog_has_a_section_of_the_version() -> None:
    assert f"\n## {project()['version']} " in (ROOT / "CHANGELOG.md").read_text()


def test_type_checkers_read_the_annotations() -> None:
    assert (ROOT / "nanotrain/py.typed").exists()


def test_the_workflow_runs_the_one_script_of_ci() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["ci"]["steps"] if "run" in step]
    assert commands == [".ci/run"]


@pytest.mark.parametrize("form", ["bug_report", "feature_request"])
def test_the_forms_of_issues_have_required_fields_with_labels(form: str) -> None:
    page = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())
    fields = [field for field in page["body"] if field["type"] == "textarea"]
    assert page["name"]
    assert page["description"]
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


@pytest.mark.parametrize(
    ("subject", "is_accepted"),
    [
        ("planner: count the launches of scans", True),
        ("Merge branch 'main'", True),
        ("count the launches of scans", False),
        ("planner: " + "x" * 64, False),
    ],
)
def test_the_hook_reads_the_subject_of_a_commit(
    subject: str, is_accepted: bool, tmp_path: Path
) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nThe reason.\n")
    result = subprocess.run(
        [ROOT / "scripts/commit_subject", message], capture_output=True, text=True
    )
    assert (result.returncode == 0) is is_accepted
    assert bool(result.stderr) is not is_accepted
