"""Attention and Mamba-2 of one input, side by side (Falcon-H1); the module is
model/attention_mamba.py.
"""

from dataclasses import replace

from nanotrain.spec.declaration import Declaration, Specs, nest
from nanotrain.spec.kinds.attention import attention, attention_operators
from nanotrain.spec.kinds.mamba import declare as mamba
from nanotrain.spec.kinds.mamba import operators as mamba_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Operators


def declare(declare: Declaration) -> Specs:
    """The parameters of attention and of Mamba-2."""
    return nest("attention", attention(declare)) + nest("mamba", mamba(declare))


def operators(s: LayerSizes) -> Operators:
    """The operators of attention and of Mamba-2, which share their input."""
    first, *others = mamba_operators(s)
    attention = attention_operators(replace(s, cast_recipe=""))  # both read the norm
    return [*attention, replace(first, saves=()), *others]
