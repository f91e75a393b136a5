"""One YAML file: which references it may have, and how a mistake in it is answered."""

from pathlib import Path

import pytest

from nanotrain.config.recipe_files import may_refer, read_yaml
from nanotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("reference", "is_allowed"),
    [
        ("model.hidden_size", True),
        (".hidden_size", True),
        ("oc.env:SCRATCH", True),
        ("oc.env:SCRATCH,/tmp", True),
        ("oc.env:AWS_SECRET_ACCESS_KEY", False),
        ("oc.decode:x", False),
        ("oc.create:x", False),
    ],
)
def test_a_file_refers_to_fields_and_to_variables_that_are_no_secrets(reference, is_allowed):
    assert may_refer(reference) is is_allowed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "line 2"),
        ("a: 1\na: 2\n", "found duplicate key a"),
        ("- a\n", "holds no mapping: a configuration has sections"),
        ("optim:\n  lr: ${oc.env:HF_TOKEN}\n", "lr in {path} refers to ${{oc.env:HF_TOKEN}}"),
        ("train:\n  notify: http://host\n", "notify in {path} is not read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_cure(tmp_path: Path, text, message):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert message.format(path=path) in str(caught.value)
