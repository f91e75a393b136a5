"""One error of a run that needs too much memory, with settings that fit."""

import math
import re

import pytest

from nanotrain.config.load import load
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError
from nanotrain.plan import fitting
from nanotrain.plan.fitting import require_memory
from nanotrain.plan.memory_plan import worst_memory

SMALL = "--mock-data --vocab-size 512 --num-layers 8 --hidden-size 64 --seq-length 64"
GB = 10**9


@pytest.fixture(autouse=True)
def search_to_the_end(monkeypatch):
    """What a search finds in a limited time depends on the machine."""
    monkeypatch.setattr(fitting, "SEARCH_S", math.inf)


def config_of(words: str):
    return load(words.split(), to_train=False).config


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_run_is_refused_only_where_what_is_certain_does_not_fit(is_compiled):
    config = config_of(f"{SMALL} --micro-batch-size 8" + " --torch-compile" * is_compiled)
    planned = worst_memory(config, 1, device="cpu")
    certain = planned.certain(0.4 if is_compiled else 0.8)
    assert certain < planned.total
    assert require_memory(config, 1, device="cpu", available=certain) == planned
    with pytest.raises(ConfigError, match="a rank needs"):
        require_memory(config, 1, device="cpu", available=certain - 1)


def test_without_steps_a_run_is_refused_where_what_is_built_does_not_fit():
    config = config_of(SMALL)
    planned = require_memory(config, 1, device="cpu", available=None)
    built, config = (
        planned.params + planned.grads + planned.optimizer,
        with_values(config, {"train.train_iters": 0}),
    )
    require_memory(config, 1, device="cpu", available=built)
    with pytest.raises(ConfigError, match="a rank needs"):
        require_memory(config, 1, device="cpu", available=built - 1)


def advice(config, world_size: int, available: int) -> str:
    with pytest.raises(ConfigError) as caught:
        require_memory(config, world_size, device="cuda", available=available)
    return caught.value.fix


def test_the_error_names_one_change_of_each_kind_that_fits():
    config = config_of(
        "+config=llama7b --data-parallel-sharding-strategy no_shard --no-overlap-param-gather"
    )
    fix = advice(config, 8, 80 * GB)
    assert "--data-parallel-sharding-strategy optim (" in fix
    assert "--tensor-model-parallel-size 2 --sequence-parallel (" in fix
    assert "ranks" not in fix.replace("each rank", "")  # more ranks alone change nothing
    numbers = [float(number) for number in re.findall(r"\(([\d.]+) GB\)", fix)]
    assert numbers and max(numbers) <= 80
    changed = with_values(
        config, {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}
    )
    assert f"{worst_memory(changed, 8, device='cuda').reserved / 1e9:.2f} GB" in fix


def test_a_smaller_micro_batch_is_named():
    words = "+config=gpt2_124m --micro-batch-size 64 --no-torch-compile"
    assert "--micro-batch-size 32 (" in advice(config_of(words), 8, 14 * GB)


def test_where_no_single_change_fits_several_are_named_together():
    fix = advice(config_of("+config=llama7b"), 1, 18 * GB)
    assert re.search(r"\d+ ranks, --tensor-model-parallel-size \d+ --sequence-parallel", fix)


def test_a_model_that_fits_nowhere_is_advised_to_shrink(monkeypatch):
    monkeypatch.setattr(fitting, "SEARCH_S", 0.5)
    assert "a smaller model" in advice(config_of("+config=llama7b"), 1, GB // 100)
    monkeypatch.setattr(fitting, "SEARCH_S", -1.0)  # no time left to search
    assert "a smaller model" in advice(config_of("+config=llama7b"), 1, 20 * GB)
