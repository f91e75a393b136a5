"""The tables of kinds: each has a module, and a cache of what its queries attend to."""

from nanotrain.model.context import CachedLayer
from nanotrain.model.sublayers import MIXER_MODULES
from nanotrain.spec.kinds import MIXERS


def test_every_kind_has_a_module() -> None:
    assert MIXERS.keys() == MIXER_MODULES.keys()


def test_kinds_with_keys_have_a_cache() -> None:
    for name, kind in MIXERS.items():
        module = MIXER_MODULES[name]
        # beside Mamba-2 attention is a module of its own
        if kind.has_keys and name != "attention_mamba2":
            assert issubclass(module, CachedLayer), name
