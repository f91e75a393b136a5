"""A sample of the generated folders of scripts/hf_folders.py: none of them may be silent."""

import re
from itertools import islice
from typing import Any

import pytest
import torch

from nanotrain.interop.hf.config_class import understand
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


def other_factors(raw: dict[str, Any]) -> dict[str, Any]:
    """Every number with a fraction in config.json with another value."""
    entries: dict[str, Any] = {}
    for entry, value in understand(raw).items():
        if entry == "block_ffn_dim_multiplier":  # the size of weights
            continue
        if entry == "query_pre_attn_scalar":
            entries[entry] = value + 5
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(each, float) and each < 1e9 for each in values):
            continue
        others = [each * (1.3 + 0.1 * index) + 0.1 for index, each in enumerate(values)]
        entries[entry] = others if isinstance(value, list) else others[0]
    return entries


# numbers of nearly every family, which other tests vary
COMMON = re.compile("eps|epsilon|coef|dropout|initializer|jitter|time_step")


def test_all_factors_of_a_family_together_mean_what_they_mean_to_transformers() -> None:
    """One folder with all of them; those that are refused by name keep their values."""
    hf_folders.quiet()
    families = set()
    for family in FAMILIES:
        name = hf_folders.bases()[family]
        raw = saved(name).raw
        factors = other_factors(raw)
        if all(COMMON.search(entry) for entry in factors):
            continue
        families.add(family)
        for _ in range(len(factors)):
            result, why = outcome(Case(family, "factors", raw | factors), saved(name).tensors)
            refused = next((entry for entry in factors if f" {entry}" in why), None)
            if result != REFUSED or refused is None:
                break
            del factors[refused]
        assert result == EQUAL, f"{family} {factors}: {result}: {why}"
    assert {"deepseek_v3", "falcon_h1", "gemma2", "granite", "llama4_text"} <= families


YARN_ENTRIES = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 1.2,
    "mscale_all_dim": 0.7,
    "attention_factor": 1.3,
    "truncate": False,
    "rope_theta": 3e4,
}
DEFAULTED = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


@pytest.mark.parametrize("value", [0, None, "left out"])
def test_zeros_and_nulls_of_yarn_mean_what_they_mean_to_transformers_or_are_refused(
    value: object,
) -> None:
    hf_folders.quiet()
    name = hf_folders.bases()["llama"]
    for entry in YARN_ENTRIES:
        rope = {"rope_type": "yarn"} | YARN_ENTRIES | {entry: value}
        if entry != "attention_factor":
            del rope["attention_factor"]  # beside others it is refused
        if value == "left out":
            del rope[entry]
        case = Case("llama", entry, saved(name).raw | {"rope_parameters": rope})
        result, why = outcome(case, saved(name).tensors)
        has_default = entry in DEFAULTED or (value == "left out" and entry != "factor")
        assert result == EQUAL or (result == REFUSED and not has_default), f"{entry}: {why}"
