"""The rows of kinds: each has a module, and kinds side by side are kinds themselves."""

from nanotrain.model.transformer import MIXER_MODULES
from nanotrain.spec.kinds import MIXERS


def test_every_kind_has_a_module_and_the_other_way_round() -> None:
    assert MIXERS.keys() == MIXER_MODULES.keys()


def test_kinds_side_by_side_are_kinds_and_have_keys_if_one_of_them_has() -> None:
    for name, kind in MIXERS.items():
        parts = [MIXERS[part] for part in kind.parts]
        assert not any(part.parts for part in parts), name
        assert not parts or kind.has_keys == any(part.has_keys for part in parts), name
