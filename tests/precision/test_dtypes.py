"""The table of dtypes."""

import json
import struct
from typing import get_args

import pytest
import torch
from safetensors.torch import save

from nanotrain.config.config import PrecisionConfig
from nanotrain.config.precision import DType
from nanotrain.precision.dtypes import DTYPE_NAMES, SAFETENSORS_NAMES, TORCH_DTYPES, Precision


def test_every_dtype_of_the_configuration_is_in_the_table():
    assert set(get_args(DType)) <= set(TORCH_DTYPES)


def test_names_and_torch_dtypes_are_one_to_one():
    assert {name: DTYPE_NAMES[dtype] for name, dtype in TORCH_DTYPES.items()} == {
        name: name for name in TORCH_DTYPES
    }


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_safetensors_names_are_those_that_safetensors_writes(name):
    data = save({"x": torch.zeros(3, dtype=TORCH_DTYPES[name])})
    (length,) = struct.unpack("<Q", data[:8])
    assert json.loads(data[8 : 8 + length])["x"]["dtype"] == SAFETENSORS_NAMES[name]


@pytest.mark.parametrize(("params", "separate"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_only_16_bit_params_have_separate_main_params(params, separate):
    precision = Precision.of(PrecisionConfig(params_dtype=params))
    assert precision.params is TORCH_DTYPES[params]
    assert precision.has_separate_main_params is separate


def test_gradients_and_main_params_are_fp32_by_default():
    for kind in get_args(DType):
        precision = Precision.of(PrecisionConfig(params_dtype=kind))
        assert precision.grads is precision.main_grads is precision.main is torch.float32
