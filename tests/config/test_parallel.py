"""Sizes that follow from the parallel layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import TopologyError


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 200))
def test_data_parallelism_is_what_the_other_axes_leave(tp, pp, cp, world):
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp
    )
    if world % (tp * pp * cp):
        with pytest.raises(TopologyError, match=f"{world} ranks? cannot form"):
            parallel.data_parallel_size(world)
    else:
        assert parallel.data_parallel_size(world) * tp * pp * cp == world
