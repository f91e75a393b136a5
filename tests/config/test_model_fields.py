"""The fields of the model section: what YaRN scales, and a section per switch."""

import math
from dataclasses import fields

import pytest

from nanotrain.config.model import ModelConfig
from nanotrain.config.model_fields import ModelFields, YarnConfig


def test_the_model_has_the_fields_and_no_more():
    assert [field.name for field in fields(ModelConfig)] == [
        field.name for field in fields(ModelFields)
    ]


def test_the_switch_of_a_section_is_a_field_of_the_model_or_of_the_section():
    for field in fields(ModelConfig):
        switch = field.metadata.get("switch")
        if switch:
            names = {*ModelConfig.__dataclass_fields__}
            names |= {*field.metadata["section"].__dataclass_fields__}
            assert switch in names, field.name


@pytest.mark.parametrize(("coefficient", "growth"), [(0.0, 1.0), (1.0, 1 + 0.1 * math.log(40))])
def test_yarn_scales_cosines_by_one_growth_and_the_softmax_by_the_square_of_another(
    coefficient, growth
):
    yarn = YarnConfig(rotary_scaling_factor=40, mscale=1.0, mscale_all_dim=coefficient)
    assert yarn.rotary_mscale == pytest.approx((1 + 0.1 * math.log(40)) / growth)
    assert yarn.softmax_mscale == pytest.approx(growth**2)
