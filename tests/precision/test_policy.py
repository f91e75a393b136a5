"""Number formats."""

import pytest
import torch

from nanotrain.config.config import DType, PrecisionConfig
from nanotrain.precision.policy import TORCH_DTYPES, Precision


@pytest.mark.parametrize(("params", "own"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_only_narrow_parameters_have_main_weights_of_their_own(params, own):
    precision = Precision.of(PrecisionConfig(params_dtype=DType(params)))
    assert precision.params is TORCH_DTYPES[params]
    assert precision.has_own_main_weights is own


def test_gradients_and_main_weights_are_fp32_whatever_the_parameters_are():
    for kind in DType:
        precision = Precision.of(PrecisionConfig(params_dtype=kind))
        assert precision.grads is precision.main is torch.float32


def test_every_dtype_a_user_can_name_is_known():
    assert set(TORCH_DTYPES) == {kind.value for kind in DType}
