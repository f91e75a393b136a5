"""What a folder says about its model."""

from pathlib import Path

from nanotrain.interop.hf.config_class import Entries
from nanotrain.interop.hf.derive.findings import Findings
from nanotrain.interop.hf.derive.tensors import TensorTable
from tests.interop.hf.derive.test_source import source_of

TABLE = TensorTable("model.layers.{layer}", {}, {})


def test_of_two_names_the_one_that_the_code_reads_counts(tmp_path: Path) -> None:
    entries = Entries({"num_attention_heads": 4, "n_heads": 8, "hidden_size": 32})
    plain = Findings("mine", "Mine", entries, TABLE, None)
    assert plain.name_of("num_attention_heads") == "num_attention_heads"
    text = "class MineForCausalLM:\n    def __init__(self, config):\n        config.n_heads\n"
    findings = Findings("mine", "Mine", entries, TABLE, source_of(tmp_path, text))
    assert findings.name_of("num_attention_heads") == "n_heads"
    assert findings.size("num_attention_heads") == 8
    assert not findings.has("hidden_size") and findings.size("hidden_size") == 32


def test_a_missing_thing_names_its_entry_and_its_line(tmp_path: Path) -> None:
    text = "class MineForCausalLM:\n    def __init__(self, config):\n        config.foo\n"
    source = source_of(tmp_path, text)
    findings = Findings("mine", "Mine", Entries({"foo": 3}), TABLE, source)
    findings.lack("the meaning of an entry", asked_by=findings.place_of("foo"))
    place = "config.json has foo: 3, read by MineForCausalLM, line 3 of modeling_mine.py"
    assert [str(missing) for missing in findings.missing] == [f"the meaning of an entry: {place}"]
