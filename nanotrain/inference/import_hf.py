"""Write a Hugging Face folder as a checkpoint of step 0, which `generate`, `diff`, `average` and `export-hf` read."""

from pathlib import Path

import torch

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.rewrite import write_checkpoint
from nanotrain.checkpoint.write import ChunkWrite
from nanotrain.config.config import CheckpointConfig, Config, DataConfig
from nanotrain.config.schema import to_dict
from nanotrain.inference.checkpoint import PREFIX
from nanotrain.interop.hf.families import model_from_hf
from nanotrain.interop.hf.import_weights import WeightReader
from nanotrain.model.router_stats import expert_biases
from nanotrain.model.transformer import build_stage
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape


def import_hf(folder: Path, output: Path) -> str:
    """Write the weights of a Hugging Face folder in fp32; returns a summary line.

    Args:
        folder: config.json and weights.
        output: the step folder to write; must not exist.

    Raises:
        HuggingFaceError: an unsupported model, or damaged files.
        CheckpointError: `output` exists.
    """
    model_config = model_from_hf(folder)
    shapes = {PREFIX + spec.name: spec.shape for spec in declare_model(ModelShape.of(model_config))}
    shapes |= {name: tuple(bias.shape) for name, bias in expert_biases(build_stage(model_config)).items()}
    reader = WeightReader(folder, model_config)

    def read(chunk: ChunkWrite) -> torch.Tensor:
        name, values = chunk.source.name, torch.empty(chunk.box.shape)
        reader.fill(values, TensorBox(name.partition("/")[2], shapes[name], chunk.box))
        return values

    tokenizer = str(folder.resolve()) if (folder / "tokenizer.json").exists() else None
    origin = CheckpointConfig(pretrained_checkpoint=str(folder.resolve()))  # whose other files an export copies
    config = Config(model=model_config, data=DataConfig(tokenizer_model=tokenizer), checkpoint=origin)
    manifest = Manifest(0, {}, {}, objects={}, config=to_dict(config), topology={})
    write_checkpoint(output, {name: (shape, "fp32") for name, shape in shapes.items()}, read=read, manifest=manifest)
    return f"{output}: {len(shapes)} tensors in fp32, from {folder}"
