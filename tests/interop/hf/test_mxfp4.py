"""MXFP4 against transformers' own dequantization, box by box, and through a folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.mxfp4 import Mxfp4Tensor, dequantized
from tests.interop.hf.reference import load, reference


def random_packed(experts: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_every_box_is_that_of_transformers() -> None:
    blocks, scales = random_packed(3, 96, 10)
    expected = convert_moe_packed_tensors(blocks, scales)
    tensor = Mxfp4Tensor("w", blocks, scales=scales)
    assert tensor.get_shape() == [3, 96, 10] == list(expected.shape)
    for box in [(slice(0, 3), slice(0, 96), slice(0, 10)), (slice(1, 2), slice(5, 70), slice(3, 9))]:
        assert torch.equal(tensor[box], expected[box])


def test_blocks_and_scales_that_do_not_fit_are_one_error() -> None:
    blocks, scales = random_packed(3, 96, 10)
    with pytest.raises(HuggingFaceError, match="w_scales is"):
        dequantized({"w_blocks": blocks, "w_scales": scales[:, :5]})
    assert dequantized({"w_blocks": blocks}) == {"w_blocks": blocks}  # a name like any other


def test_a_folder_in_mxfp4_has_the_logits_of_its_dequantized_weights(tmp_path: Path) -> None:
    theirs = reference("gpt_oss")
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for layer, block in enumerate(theirs.model.layers):
            for name in ("gate_up_proj",):
                weight = getattr(block.mlp.experts, name)
                blocks, scales = random_packed(*weight.shape)
                weight.copy_(convert_moe_packed_tensors(blocks, scales))
                key = f"model.layers.{layer}.mlp.experts.{name}"
                del stored[key]
                stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    tokens = torch.randint(0, 100, (2, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(load(tmp_path).logits(tokens), theirs(tokens).logits, rtol=1e-4, atol=2e-5)
