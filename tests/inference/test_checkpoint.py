"""Text and a Hugging Face folder from a checkpoint, without its run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.group import Group
from nanotrain.config.config import Config
from nanotrain.config.schema import config_from_dict, to_dict
from nanotrain.data.tokenizer import load_with_files
from nanotrain.errors import CheckpointError, DataError
from nanotrain.inference.checkpoint import (
    average_with_tokenizer,
    export_checkpoint,
    load_checkpoint,
    load_stage,
    open_checkpoint,
)
from nanotrain.inference.generate import Sampling
from nanotrain.model.parameters import initialize
from nanotrain.model.router_stats import router_tensors
from nanotrain.model.transformer import Stage, build_stage
from nanotrain.spec.boxes import Box, TensorBox

EXPERTS = {"num_experts": 4, "ffn_hidden_size": 16, "router_score_function": "sigmoid"}


def write_run(
    folder: Path,
    *,
    tokenizer: str | None = "bytes",
    moe: dict[str, object] | None = None,
    **options: object,
) -> Stage:
    """The folder of a run that has saved once, and the model it saved; `options` of its
    configuration.
    """
    model = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 257,
        "moe": moe or {},
    } | options
    data = {"tokenizer_model": tokenizer, "data_path": ["text"]}
    config: Config = config_from_dict({"model": model, "data": data})
    stage = build_stage(config.model).to_empty(device="cpu")
    specs = [local.spec for local in stage.params]
    initialize(stage, stage.params, seed=1)
    weights = dict(stage.named_parameters())
    tensors = {
        TensorBox(f"model/{spec.name}", spec.shape, Box.full(spec.shape)): weights[spec.name].data
        for spec in specs
    }
    for index, (name, bias) in enumerate(router_tensors(stage).items()):
        bias.copy_(torch.tensor([9.0, -9.0, 0.0, 3.0 * index]))
        tensors[TensorBox.full(name, bias.shape)] = bias
    checkpointer = Checkpointer(
        folder / "checkpoints", group=Group.single_rank("world"), keep_last=0
    )
    checkpointer.save(3, tensors, objects={}, config=to_dict(config), topology={})
    return stage


def test_the_model_comes_back_to_the_bit(tmp_path):
    saved = write_run(tmp_path)
    loaded = load_stage(open_checkpoint(tmp_path))
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(loaded.logits(tokens), saved.logits(tokens))


def test_expert_biases_come_back(tmp_path):
    saved = write_run(tmp_path, moe=EXPERTS | {"router_enable_expert_bias": True})
    loaded = load_stage(open_checkpoint(tmp_path))
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(loaded.logits(tokens), saved.logits(tokens))
    assert [bias.tolist() for bias in router_tensors(loaded).values()] == [
        [9, -9, 0, 0],
        [9, -9, 0, 3],
    ]


def test_a_checkpoint_without_a_tensor_of_its_model_is_one_error(tmp_path):
    write_run(tmp_path, moe=EXPERTS)
    opened = open_checkpoint(tmp_path)
    moe = replace(opened.config.model.moe, router_enable_expert_bias=True)
    config = replace(opened.config, model=replace(opened.config.model, moe=moe))
    with pytest.raises(
        CheckpointError, match=r"holds no tensor router/layers\.0\.mlp\.router\.expert_bias"
    ):
        load_stage(replace(opened, config=config))


def test_the_same_seed_writes_the_same_text(tmp_path):
    write_run(tmp_path)
    texts = [
        load_checkpoint(tmp_path).generate("abc", num_tokens=8, sampling=Sampling(seed=seed))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("abc") for text in texts)
    assert isinstance(load_checkpoint(tmp_path).generate(num_tokens=2), str)


def test_a_run_without_a_tokenizer_writes_no_text_unless_given_one(tmp_path):
    write_run(tmp_path, tokenizer=None)
    with pytest.raises(
        DataError, match="holds none, and the corpus text of the training is not in .*--tokenizer"
    ):
        load_checkpoint(tmp_path)
    assert "; without a tokenizer: the run folder" in export_checkpoint(
        tmp_path, tmp_path / "hf", dtype="fp32"
    )
    with pytest.raises(DataError, match="none of tokenizer.json, .*, tekken.json in the folder"):
        load_checkpoint(tmp_path / "hf")
    (tmp_path / "hf" / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_checkpoint(tmp_path / "hf")
    assert (
        load_checkpoint(str(tmp_path), tokenizer="bytes")
        .generate("abc", num_tokens=2)
        .startswith("abc")
    )


def test_an_average_keeps_the_tokenizer_of_its_run(tmp_path):
    write_run(tmp_path / "run", tokenizer=None)
    load_with_files("bytes").save(tmp_path / "run" / "tokenizer")
    average_with_tokenizer([tmp_path / "run"], tmp_path / "mean")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    average_with_tokenizer([tmp_path / "mean"], tmp_path / "again")
    assert load_checkpoint(tmp_path / "again").generate("abc", num_tokens=2).startswith("abc")


def test_the_exported_folder_holds_the_weights_without_padding(tmp_path):
    # given a run whose embedding is padded from 257 to 384 rows
    stage = write_run(tmp_path)
    # when it is exported
    line = export_checkpoint(tmp_path, tmp_path / "hf", dtype="fp32")
    # then the first 257 rows are there, to the bit
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    padded = dict(stage.named_parameters())["embedding.word.weight"]
    assert padded.shape[0] == 384
    assert torch.equal(weights["model.embed_tokens.weight"], padded.data[:257])
    assert "llama" in line and (tmp_path / "hf" / "config.json").is_file()
