"""The oracle is transformers itself: same weights, same numbers, both ways."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from nanotrain.interop.hf.export import export_weights
from nanotrain.interop.hf.families import FAMILIES, family_of
from nanotrain.interop.hf.names import map_parameters
from nanotrain.model.context import BatchContext
from nanotrain.model.transformer import Stage
from nanotrain.spec.boxes import Box
from tests.attention.fp64_transformers import modeling_in_fp64
from tests.interop.hf.configs import CONFIGS, IN_FP64
from tests.interop.hf.llama_like import IN_FILES
from tests.interop.hf.reference import aligned, biases_of, load, reference, tensors_of
from tests.model.building import random_batch


@pytest.fixture(scope="module")
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.nn.Module, Stage]:
    """The model of a name, by transformers and by us from its files."""
    theirs, folder = reference(request.param), tmp_path_factory.mktemp("in")
    theirs.save_pretrained(folder)
    return theirs, load(folder)


@pytest.mark.parametrize("models", [name for name in CONFIGS if name not in IN_FP64], indirect=True)
def test_logits_and_every_gradient_are_those_of_transformers(
    models: tuple[torch.nn.Module, Stage],
) -> None:
    (theirs, ours), batch = models, random_batch(length=40)

    logits = theirs(batch.tokens).logits
    torch.testing.assert_close(ours.logits(batch.tokens), logits, rtol=0, atol=1e-5)

    each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    expected = (each * batch.loss_mask.flatten()).sum()
    actual = ours(None, BatchContext(batch))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    (expected / 40).backward()
    (actual / 40).backward()
    assert_same_gradients(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", IN_FP64)
def test_logits_and_every_gradient_in_fp64_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrences amplify the rounding of fp32; biases of routers stay in fp32."""
    modeling_in_fp64(IN_FP64[name], monkeypatch)
    theirs, batch = reference(name), random_batch(length=70)
    for parameter in theirs.parameters():  # transformers makes some in fp32, which is fp64 here
        parameter.data = parameter.data.to(torch.float32)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path).double()
    theirs.config._experts_implementation = "eager"

    expected, computed = theirs.double()(batch.tokens).logits, ours.logits(batch.tokens)
    for logits in (expected, computed):
        F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
    assert computed.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-12)
    assert_same_gradients(ours, theirs, rtol=1e-10, atol=1e-12)


def name_in_files(name: str, kind: str) -> str:
    """The name of a tensor in files, in memory or between both as `other_layers` has it."""
    for in_memory, in_files in IN_FILES.get(kind, {}).items():
        name = name.replace(in_memory, in_files, 1)
    return name


def assert_same_gradients(
    ours: Stage, theirs: torch.nn.Module, *, rtol: float, atol: float
) -> None:
    """Every gradient of ours is that of the tensors that transformers has in memory, all of which
    are ours.
    """
    family = FAMILIES[family_of(ours.model_config, name=theirs.config.model_type)]
    stored = {key: name_in_files(key, theirs.config.model_type) for key in tensors_of(theirs)}
    # transformers does not train an indexer
    grads = (
        (key, 0 * value if value.grad is None else value.grad)
        for key, value in theirs.named_parameters()
    )
    gradients = {stored[key]: grad for key, grad in grads}
    naming = family.namings[-1]  # of transformers 5: experts are fused in memory
    mappings = map_parameters(ours.model_config, naming)
    trained = {name for name in stored.values() if name in gradients}
    tensors = {tensor for mapping in mappings.values() for tensor in mapping.tensor_shapes}
    assert tensors == {*stored.values()} and trained == gradients.keys()
    for key, parameter in ours.named_parameters():
        for piece in mappings[key].slices(Box.full(mappings[key].shape)):
            part = piece.as_parameter(gradients[piece.tensor][piece.stored.slices()])
            found_part = parameter.grad[piece.box.slices()]
            torch.testing.assert_close(found_part, part, rtol=rtol, atol=atol, msg=key)


# families whose models an earlier one can hold too: such models are exported by name
NAMED = {
    "mistral",
    "phi3",
    "seed_oss",
    "dots1",
    "solar_open",
    "qwen3_5_moe_text",
    "glm4_moe_lite",
    "granite",
    "ernie4_5",
    "deepseek_v2",
    "glm_moe_dsa",
    "exaone",
    "helium",
    "hy_v3",
    "persimmon",
    "internlm3",
    "iquestcoder",
    "sarvam_mla",
    "sarvam_moe",
    "ministral",
    "jais2",
    "youtu",
    "granitemoeshared",
    "apertus1p5_text",
    "codegen",
    "cohere_compass_text",
    "hyperclovax",
    "lfm3",
}


@pytest.mark.parametrize("models", CONFIGS, indirect=True)
def test_import_then_export_is_the_identity_to_the_bit(
    models: tuple[torch.nn.Module, Stage], tmp_path: Path
) -> None:
    theirs, ours = models
    kind = theirs.config.model_type
    named = kind if kind in NAMED and family_of(ours.model_config) != kind else None
    tensors = tensors_of(ours) | biases_of(ours)
    family = export_weights(tmp_path, ours.model_config, tensors=tensors.items(), family=named)
    assert family == kind

    # Mistral 4 is there as a part of a model of images and text alone
    auto = type(theirs) if kind == "mistral4" else transformers.AutoModelForCausalLM
    back = aligned(auto.from_pretrained(tmp_path))
    assert type(back) is type(theirs)
    expected, actual = tensors_of(theirs), tensors_of(back)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    batch = random_batch()
    assert torch.equal(back(batch.tokens).logits, theirs(batch.tokens).logits)
    again = load(tmp_path)
    assert all(
        torch.equal(again.get_parameter(key), value) for key, value in tensors_of(ours).items()
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_sharded_bf16_files_load_alike(name: str, tmp_path: Path) -> None:
    theirs = reference(name).bfloat16()
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    expected, actual = tensors_of(load(tmp_path / "one")), tensors_of(load(tmp_path / "many"))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_files_of_the_bare_transformer_and_old_buffers_load(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "whole")
    bare = getattr(theirs, theirs.base_model_prefix)
    buffer = "h.0.attn.bias" if name == "gpt2" else "layers.0.self_attn.rotary_emb.inv_freq"
    state = bare.state_dict() | {buffer: torch.ones(3)}
    (tmp_path / "bare").mkdir()
    theirs.config.save_pretrained(tmp_path / "bare")
    save_file(state, tmp_path / "bare" / "model.safetensors")
    expected, actual = tensors_of(load(tmp_path / "whole")), tensors_of(load(tmp_path / "bare"))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_ten_steps_of_adamw_on_the_same_weights_give_the_same_losses(tmp_path: Path) -> None:
    theirs = reference("llama3")
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    theirs.train()
    losses: dict[str, list[float]] = {"theirs": [], "ours": []}
    optimizers = {
        "theirs": torch.optim.AdamW(theirs.parameters(), lr=1e-3),
        "ours": torch.optim.AdamW(ours.parameters(), lr=1e-3),
    }
    for step in range(10):
        batch = random_batch(seed=step)
        count = batch.loss_mask.sum()
        logits = theirs(batch.tokens).logits.flatten(0, 1)
        each = F.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        for who, loss in (
            ("theirs", (each * batch.loss_mask.flatten()).sum()),
            ("ours", ours(None, BatchContext(batch))),
        ):
            mean = loss / count
            mean.backward()
            optimizers[who].step()
            optimizers[who].zero_grad()
            losses[who].append(mean.item())
    assert losses["ours"] == pytest.approx(losses["theirs"], rel=1e-5)
    assert losses["ours"][-1] != losses["ours"][0]
