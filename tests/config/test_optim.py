"""The section of the optimizer: which values its fields refuse."""

import pytest

from nanotrain.config.load import load_config
from nanotrain.config.schema import config_from_dict
from nanotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "requirement"),
    [
        ("lr", 0, "must be above 0"),
        ("min_lr", -1e-5, "must be at least 0"),
        ("adam_beta1", 1.0, "must be at least 0 and below 1"),
        ("muon_num_ns_steps", 0, "must be at least 1"),
        ("ema_decay", 1.0, "must be at least 0 and below 1"),
        ("lr_wsd_decay_style", "sine", "linear, cosine, exponential, minus_sqrt"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bound(name, value, requirement):
    with pytest.raises(ConfigError, match=requirement):
        config_from_dict({"optim": {name: value}})


@pytest.mark.parametrize(
    ("kind", "steps", "fix"),
    [("quintic", 6, "set --muon-num-ns-steps 5"), ("hybrid", 2, "set --muon-num-ns-steps 10")],
)
def test_coefficients_that_differ_by_step_fit_the_number_of_steps(
    kind: str, steps: int, fix: str
) -> None:
    flags = f"--optimizer muon --muon-coefficient-type {kind} --muon-num-ns-steps {steps}"
    with pytest.raises(ConfigError, match=fix):
        load_config(["+config=tiny", *flags.split()])
    load_config(["+config=tiny", *flags.split()[:-1], "10"])
