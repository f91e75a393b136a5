"""Flags of earlier versions of Megatron-LM."""

import pytest

from nanotrain.config.load import load
from nanotrain.errors import ConfigError

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"


def test_a_script_of_an_earlier_version_loads_with_its_values():
    line = f"""{SIZES} --megatron-defaults --DDP-impl local --no-contiguous-buffers-in-local-ddp --data-impl mmap
        --layernorm-epsilon 1e-6 --no-query-key-layer-scaling --mmap-warmup --override-lr-scheduler --delay-grad-reduce
        --checkpoint-granularity full --checkpoint-method block --checkpoint-num-layers 2 --bf16 --fp8-hybrid
        --initial-loss-scale 65536"""
    loaded = load(line.split())
    config = loaded.config
    assert config.model.norm_epsilon == 1e-6 and config.precision.fp8_format.value == "hybrid"
    assert (config.memory.recompute_granularity.value, config.memory.recompute_method.value) == ("full", "block")
    assert config.memory.recompute_num_layers == 2
    assert config.precision.initial_loss_scale == 2.0**32, "bf16 has no loss scale, in Megatron-LM neither"
    assert any("initial_loss_scale: default" in note for note in loaded.notes)


def test_token_files_of_the_formats_before_are_an_error():
    with pytest.raises(ConfigError, match=r"--data-impl lazy contradicts .* PREFIX.bin and PREFIX.idx"):
        load([*SIZES.split(), "--data-impl", "lazy"])


@pytest.mark.parametrize(("flags", "method"), [("", "uniform"), ("--checkpoint-method block ", "block")])
def test_recomputation_of_earlier_versions_is_full(flags, method):
    line = f"{SIZES} {flags}--checkpoint-activations --checkpoint-num-layers 1 --tokenizer-name-or-path gpt2"
    config = load(line.split()).config
    memory = config.memory
    assert (memory.recompute_granularity.value, memory.recompute_method.value) == ("full", method)
    assert memory.recompute_num_layers == 1 and config.data.tokenizer_model == "gpt2"


def test_muon_with_a_sharded_state_has_no_name_of_its_own():
    assert load(f"{SIZES} --optimizer dist_muon --muon-momentum 0.8".split()).config.optim.optimizer == "muon"
