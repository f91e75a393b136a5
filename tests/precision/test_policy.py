"""The precision policy."""

import pytest
import torch

from nanotrain.config.config import DType, PrecisionConfig
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.precision.policy import Precision


@pytest.mark.parametrize(("params", "separate"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_only_16_bit_params_have_separate_main_params(params, separate):
    precision = Precision.of(PrecisionConfig(params_dtype=DType(params)))
    assert precision.params is TORCH_DTYPES[params]
    assert precision.has_separate_main_params is separate


def test_gradients_and_main_params_are_fp32_by_default():
    for kind in DType:
        precision = Precision.of(PrecisionConfig(params_dtype=kind))
        assert precision.grads is precision.main_grads is precision.main is torch.float32
