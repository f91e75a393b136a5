"""`nanotrain family add`: rows that are taken out of the tables come back without a hand."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf import families
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.derive.folder import derive_family
from nanotrain.interop.hf.families import FAMILIES, model_from_hf
from nanotrain.interop.hf.folder_row import ROW_FILE
from nanotrain.parity import added_family
from nanotrain.parity.added_family import add_family
from nanotrain.parity.conversion import TOLERANCE, ConversionReport
from tests.interop.hf.derive.folders import (
    change_config,
    kind_of,
    restored_tables,
    write_folder,
    write_own_code,
)
from tests.interop.hf.reference import load
from tests.model.building import random_batch

# families whose rows need names and switches alone
DERIVED = (
    *("exaone", "internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe", "helium", "ministral"),
    *("starcoder2", "nemotron", "jais2", "vaultgemma", "youtu", "granitemoeshared", "granite_swa"),
    *("granitemoe_swa", "hy_v3", "afmoe", "mellum", "flint", "persimmon", "gpt_bigcode"),
    *("aria_text", "apertus1p5_text", "hyperclovax"),
)


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    with restored_tables():
        yield


@pytest.mark.parametrize("name", DERIVED)
def test_a_row_comes_back_and_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    kind = kind_of(name)
    write_folder(tmp_path, name)
    expected = model_from_hf(tmp_path)
    del FAMILIES[kind]

    added = add_family(tmp_path, output=None, in_tree=False)

    assert kind not in FAMILIES
    assert added.report is not None and added.report.holds
    assert max(added.report.logits, added.report.gradients) <= TOLERANCE
    # the folder now has its row, and describes the model that the row of the package describes
    derived = model_from_hf(tmp_path)
    assert kind in families.FOLDER_ROWS
    assert canonical(derived) == canonical(expected)


@pytest.mark.parametrize("name", ["hy_v3", "helium", "vaultgemma"])
def test_a_folder_without_weights_has_the_names_that_transformers_saves(
    name: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "with", name)
    write_folder(tmp_path / "without", name)
    (tmp_path / "without" / "model.safetensors").unlink()
    del FAMILIES[kind_of(name)]
    rows = [add_family(tmp_path / end, output=None, in_tree=False) for end in ("with", "without")]
    assert rows[0].row == rows[1].row and rows[1].report is not None and rows[1].report.holds
    assert "the folder has no weights" in rows[1].text()


def test_a_model_that_transformers_lacks_is_read_from_text(tmp_path: Path) -> None:
    """The code of the folder, which ends the process if it is run, is only parsed."""
    folder = write_own_code(tmp_path / "mine")
    theirs = load(write_folder(tmp_path / "llama", "llama"))

    added = add_family(folder, output=None, in_tree=False)

    assert added.report is None and "not compared" in added.text()
    ours = load(folder)
    batch = random_batch()
    assert torch.equal(ours.logits(batch.tokens), theirs.logits(batch.tokens))


def test_what_is_missing_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    code = (folder / "modeling_mine.py").read_text()
    call = "attn_output = self.o_proj(attn_output)"
    assert call in code
    changed = code.replace(call, f"{call} * self.config.foo_gain + self.config.foo_limit")
    (folder / "modeling_mine.py").write_text(changed)
    change_config(folder, foo_gain=True, foo_limit=7.5)
    with pytest.raises(HuggingFaceError) as caught:
        add_family(folder, output=None, in_tree=False)
    message = str(caught.value)
    assert "no row for mine: nanotrain lacks 1 thing" in message
    assert "foo_limit: 7.5, read by MineAttention, line" in message
    change_config(folder, foo_limit=0.0)
    with pytest.raises(HuggingFaceError, match="foo_gain: true, read by MineAttention"):
        add_family(folder, output=None, in_tree=False)
    assert not (folder / ROW_FILE).exists()


ROTATE = "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)"


@pytest.mark.parametrize(
    ("old", "new", "entries", "named"),
    [
        (
            ROTATE,
            f"if self.config.use_rope:\n            {ROTATE}",
            {"use_rope": False},
            "config.json has use_rope: false, read by MineAttention",
        ),
        (
            "self.scaling = self.head_dim**-0.5",
            "self.scaling = self.head_dim**-0.5\n        self.gain = args.foo_gain",
            {"foo_gain": 2.5},
            "config.json has foo_gain: 2.5",
        ),
        (
            "eps=config.rms_norm_eps",
            "eps=config.layer_norm_eps",
            {},
            "an entry for the epsilon of norms: MineRMSNorm(config.hidden_size, "
            "eps=config.layer_norm_eps)",
        ),
        ("eps=config.rms_norm_eps", "eps=1e-3", {}, "an entry for the epsilon of norms"),
        (
            "attn_output = self.o_proj(attn_output)",
            "attn_output = self.o_proj(attn_output) * self.config.foo_gain",
            {},
            "that config.json does not have: foo_gain, read by MineAttention",
        ),
        (
            "attn_output = self.o_proj(attn_output)",
            "attn_output = self.o_proj(attn_output) * getattr(self.config, 'foo_gain', 2)",
            {},
            "that config.json does not have: foo_gain, read by MineAttention",
        ),
    ],
)
def test_code_that_may_compute_something_else_is_refused_where_nothing_is_compared(
    old: str, new: str, entries: dict[str, object], named: str, tmp_path: Path
) -> None:
    """A switch that is off, other names of a configuration, and values that config.json lacks."""
    folder = write_own_code(tmp_path)
    path = folder / "modeling_mine.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    change_config(folder, **entries)
    with pytest.raises(HuggingFaceError) as caught:
        add_family(folder, output=None, in_tree=False)
    assert named in str(caught.value)
    assert not (folder / ROW_FILE).exists()


def test_an_entry_that_only_the_configuration_computes_with_is_used(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    path = folder / "configuration_mine.py"
    lines = "    norm_eps: float = 1e-6\n    pretraining_tp"
    text = path.read_text().replace("    pretraining_tp", lines)
    path.write_text(text)
    change_config(folder, norm_eps=0.01)
    assert "norm_eps" in derive_family(folder).row["passed_over"]
    body = "def __post_init__(self, **kwargs):\n"
    assert body in text
    path.write_text(text.replace(body, f"{body}        self.rms_norm_eps = self.norm_eps\n"))
    with pytest.raises(HuggingFaceError, match="config.json has norm_eps: 0.01"):
        add_family(folder, output=None, in_tree=False)


def test_defaults_of_another_class_of_the_file_are_not_taken(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    path = folder / "configuration_mine.py"
    other = "\nclass MineVisionConfig:\n    def __init__(self, rms_norm_eps=0.5): ...\n"
    path.write_text(path.read_text() + other)
    added = add_family(folder, output=None, in_tree=False)
    assert added.row["defaults"]["rms_norm_eps"] == 1e-6


def test_a_tensor_without_a_module_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_own_code(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.foo_mix.weight"] = torch.ones(3, 5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HuggingFaceError, match=r"self_attn.foo_mix \[3, 5\]"):
        add_family(folder, output=None, in_tree=False)


def test_another_order_of_a_block_is_named(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    path = folder / "modeling_mine.py"
    norm = "hidden_states = self.post_attention_layernorm(hidden_states)\n"
    again = f"{norm}        {norm}"
    path.write_text(path.read_text().replace(norm, again))
    with pytest.raises(HuggingFaceError, match="post_attention_layernorm post_attention_layernorm"):
        add_family(folder, output=None, in_tree=False)


def test_a_row_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, "helium")
    del FAMILIES["helium"]
    wrong = ConversionReport("helium", "5", 2, 32, 0.5, 0.5, "w", 1, is_round_trip=True)
    monkeypatch.setattr(added_family, "check_conversion", lambda *args, **options: wrong)
    with pytest.raises(
        HuggingFaceError, match=r"computes something else.*logits differ by 5.0e-01"
    ):
        add_family(tmp_path, output=None, in_tree=False)
    assert not (tmp_path / ROW_FILE).exists()
    assert "helium" not in FAMILIES


def test_rotary_pairs_that_the_text_hides_are_found_to_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is the judge: a rule that overlooks the pairs of Helium writes no row."""
    write_folder(tmp_path, "helium")
    del FAMILIES["helium"]
    monkeypatch.setattr(
        "nanotrain.interop.hf.derive.module_names.has_neighbour_pairs", lambda f: False
    )
    with pytest.raises(HuggingFaceError, match="computes something else than transformers"):
        add_family(tmp_path, output=None, in_tree=False)


def test_the_row_goes_to_a_file_or_into_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "helium", "helium")
    del FAMILIES["helium"]
    added = add_family(folder, output=tmp_path / "rows.yaml", in_tree=False)
    assert added.files == (tmp_path / "rows.yaml",) and not (folder / ROW_FILE).exists()
    assert families.load_families(tmp_path / "rows.yaml").keys() == {"helium"}
    assert json.loads(added.to_json())["check"]["holds"]

    for name in ("TABLES", "MODELS"):
        copy = tmp_path / name
        copy.write_text(getattr(added_family, name).read_text())
        monkeypatch.setattr(added_family, name, copy)
    rows = yaml.safe_load((tmp_path / "TABLES").read_text())
    del rows["families"]["helium"]
    (tmp_path / "TABLES").write_text(yaml.safe_dump(rows, sort_keys=False))
    added = add_family(folder, output=None, in_tree=True)
    row = yaml.safe_load((tmp_path / "TABLES").read_text())["families"]["helium"]
    assert row == added.row
    named = yaml.safe_load((tmp_path / "MODELS").read_text())["supported"]["helium"]
    assert named == ["Helium", f"derived; nearest to {added.nearest.partition(':')[0]}"]


def test_a_link_in_place_of_the_row_is_not_followed(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path / "mine")
    target = tmp_path / "precious"
    target.write_text("mine")
    (folder / ROW_FILE).symlink_to(target)
    with pytest.raises(HuggingFaceError, match="symbolic link"):
        add_family(folder, output=None, in_tree=False)
    assert target.read_text() == "mine"


def test_a_model_type_that_no_row_can_have_is_refused(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    change_config(folder, model_type="my model")
    (folder / "configuration_mine.py").unlink()
    with pytest.raises(HuggingFaceError, match="model_type is 'my model', it must be a name"):
        add_family(folder, output=None, in_tree=False)
    assert not (folder / ROW_FILE).exists()


def test_an_earlier_file_is_replaced_whatever_its_lines_end_with(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    add_family(folder, output=None, in_tree=False)
    written = (folder / ROW_FILE).read_bytes()
    (folder / ROW_FILE).write_bytes(written.replace(b"\n", b"\r\n"))
    add_family(folder, output=None, in_tree=False)
    assert (folder / ROW_FILE).read_bytes() == written


def test_an_earlier_file_that_is_broken_is_one_error(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    (folder / ROW_FILE).write_bytes(b"\xff")
    with pytest.raises(HuggingFaceError, match="is no row of a family"):
        add_family(folder, output=None, in_tree=False)


def test_a_row_that_lacks_a_name_is_one_error(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    add_family(folder, output=None, in_tree=False)
    model_from_hf(folder)
    layers = dict(FAMILIES["mine"].layers)
    del layers["attention.output"]
    FAMILIES["mine"] = replace(FAMILIES["mine"], layers=layers)
    with pytest.raises(HuggingFaceError, match="does not name the tensors of the model"):
        load(folder)


def test_a_known_family_is_not_derived(tmp_path: Path) -> None:
    with pytest.raises(HuggingFaceError, match="llama has a row already"):
        add_family(write_folder(tmp_path, "llama"), output=None, in_tree=False)


def test_a_row_travels_with_an_export(tmp_path: Path) -> None:
    from nanotrain.inference.checkpoint import export_checkpoint
    from nanotrain.interop.hf.import_weights import import_hf

    folder = write_own_code(tmp_path / "mine")
    add_family(folder, output=None, in_tree=False)
    import_hf(folder, tmp_path / "step-00000000")
    export_checkpoint(tmp_path / "step-00000000", tmp_path / "out")
    text = (folder / ROW_FILE).read_text()
    assert (tmp_path / "out" / ROW_FILE).read_text() == text
    assert model_from_hf(tmp_path / "out") == model_from_hf(folder)
    changed = tmp_path / "out" / ROW_FILE
    changed.write_text(text.replace("parts:", "ignored: [foo.*]\n    parts:"))
    with pytest.raises(HuggingFaceError, match="another row for mine"):
        model_from_hf(tmp_path / "out")


def test_the_vocabulary_and_seed_of_the_check_are_fixed(tmp_path: Path) -> None:
    """Two runs print the same numbers."""
    write_folder(tmp_path, "helium")
    del FAMILIES["helium"]
    first = add_family(tmp_path, output=tmp_path / "a", in_tree=False)
    second = add_family(tmp_path, output=tmp_path / "b", in_tree=False)
    assert first.report == second.report
    assert replace(first, files=()) == replace(second, files=())
