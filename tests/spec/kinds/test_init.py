"""The rows of kinds: those side by side are kinds themselves."""

from nanotrain.spec.kinds import MIXERS


def test_kinds_side_by_side_are_kinds_and_have_keys_if_one_of_them_has() -> None:
    for name, kind in MIXERS.items():
        parts = [MIXERS[part] for part in kind.parts]
        assert not any(part.parts for part in parts), name
        assert not parts or kind.has_keys == any(part.has_keys for part in parts), name
