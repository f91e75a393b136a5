"""Names of other frameworks lead to flags that exist, and are none themselves."""

from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS
from nanotrain.config.megatron import MEGATRON
from nanotrain.config.schema import ENTRIES
from nanotrain.config.synonyms import CURES, NAMES, VALUES

KNOWN = {*FLAGS, *NEGATIONS, *ALIASES, *MEGATRON}


def test_every_cure_by_meaning_names_flags_that_exist():
    for cure in NAMES:
        flag = cure.split()[0].rstrip(",:")
        assert not flag.startswith("--") or flag in {*KNOWN, "--data-parallel-size", "--config-dir"}, cure
    assert not {name for name in CURES if f"--{name.replace('_', '-')}" in KNOWN}
    assert sum(len(names.split()) for names in NAMES.values()) == len(CURES), "a name has one meaning"
    for name, values in VALUES.items():
        assert name in ENTRIES and not (set(values) & set(ENTRIES[name].choices))
