"""A YAML file is checked before it is composed."""

import pytest

from nanotrain.config.yaml_file import MAX_BYTES, check_yaml
from nanotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xfc", "it is not UTF-8: byte 3 is 0xfc"),
        (b"#" * (MAX_BYTES + 1), "it is larger than 1,048,576 bytes"),
        (b"a: [", "cannot be read"),
        (b"a: " + b"[" * 2000, "cannot be read"),
        (b"a:\n  b: 1\n  c: 2\n  b: 3\n", "b is set twice in one section, the second time in line 4"),
        (b"- {a: 1}\n- {b: 1, b: 2}\n", "b is set twice in one section, the second time in line 2"),
    ],
)
def test_what_is_no_configuration_is_one_error(content, message, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_yaml(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"a: {b: 1}\nc: {b: 1}\n", b"x: &x {b: 1}\na: *x\nc: {<<: *x, b: 2}\n"])
def test_one_key_in_two_sections_is_no_duplicate(content, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    check_yaml(path)
