"""A sample of the generated folders of scripts/hf_folders.py: none of them may be silent."""

from itertools import islice

import pytest
import torch

from scripts import hf_folders
from scripts.hf_folders import EQUAL, REFUSED, SILENT, Case, outcome, saved
from tests.scripts import SCRIPTS

FAMILIES = sorted(hf_folders.bases())
# every fourth family, and of each of these every so many cases, from another one on
SAMPLE = FAMILIES[::4]
STEPS = {"rope": 11, "fields": 67}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("family", SAMPLE)
def test_folders_mean_what_they_mean_to_transformers_or_are_refused(family: str, kind: str) -> None:
    hf_folders.quiet()
    name = hf_folders.bases()[family]
    first = SAMPLE.index(family) % STEPS[kind]
    cases = list(islice(hf_folders.CASES[kind](family, name), first, None, STEPS[kind]))
    assert cases
    for case in cases:
        result, why = outcome(case, saved(name).tensors)
        assert result in (EQUAL, REFUSED, hf_folders.NO_LOGITS), f"{case.name}: {result}: {why}"


def test_there_are_at_least_500_folders_of_rotary_positions() -> None:
    num_folders = len(FAMILIES) * len(hf_folders.ROPE_FORMS)
    assert num_folders >= 500
    page = (SCRIPTS.parent / "docs" / "families.md").read_text()
    assert f"folders of {len(FAMILIES)} families" in page and f"| {num_folders:,} |" in page


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = hf_folders.bases()["llama"]
    case = Case("llama", "as it is", saved(name).raw)
    assert outcome(case, saved(name).tensors)[0] == EQUAL
    logits = hf_folders._their_logits

    def other_logits(folder: object) -> tuple[torch.Tensor | None, str]:
        theirs, why = logits(folder)  # type: ignore[arg-type]
        return (None if theirs is None else theirs + 1e-3 * theirs.abs().max()), why

    monkeypatch.setattr(hf_folders, "_their_logits", other_logits)
    assert outcome(case, saved(name).tensors)[0] == SILENT
