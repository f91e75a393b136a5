"""Import and export are the identity, byte for byte: every family, from sharded files, through
sharded layouts.

The first model of each family, in fp32, is imported by four ranks, tp 2 x pp 2 with the experts
over ep 2, and exported from their checkpoint; all others, in bf16, are imported and exported as by
the commands of `nanotrain checkpoint`. Of these the suite has a few, and `make layouts` all; both
ways of their tensors are in test_against_transformers.py too.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.data.build import DatasetSplits
from nanotrain.inference.checkpoint import export_checkpoint
from nanotrain.interop.hf.families import FAMILIES, model_from_hf, read_config
from nanotrain.interop.hf.import_weights import import_hf
from nanotrain.plan.plan import plan_run
from nanotrain.runs.folder import RunFolder
from nanotrain.train.build import build_run
from nanotrain.train.run import RunInputs
from tests.harness import SHORT_NAMES, run_ranks
from tests.interop.hf.configs import CONFIG_CLASSES, CONFIGS
from tests.interop.hf.reference import reference
from tests.interop.hf.tiny_tokenizers import qwen
from tests.laws.more_layouts import with_mark
from tests.laws.test_any_topology import save_step
from tests.laws.worlds import Case, UnevenDataset, config_of

SIZES = {"strategy": "optim", "tp": 2, "pp": 2, "etp": 1, "ep": 2}
STEP = Path("checkpoints", "step-00000000")
FIRST = {family: name for name, (family, _) in reversed(CONFIGS.items())}  # a name of each family
TOKENIZER = {  # of a class that transformers takes in every family
    "tokenizer.json": qwen().to_str() + "\r\n",
    "tokenizer_config.json": '{"eos_token":"<|im_end|>",\r\n"tokenizer_class":"Qwen2Tokenizer"}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [3, 5],\r\n "temperature": 0.25}',
}


def write_source(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """A folder as transformers writes it, in several files, with a tokenizer that names other
    special tokens.
    """
    model = reference(name).to(dtype)
    for key, bias in (*model.named_buffers(), *model.named_parameters()):
        if key.endswith(("e_score_correction_bias", "mlp.expert_bias")):  # always fp32 in files
            bias.data = bias.float()
    model.save_pretrained(folder, max_shard_size="15KB")
    for file, text in TOKENIZER.items():
        (folder / file).write_bytes(text.encode())
    return folder


def save_imported(ctx: ParallelContext, root: Path, names: list[str]) -> None:
    """Every rank imports its shards of every model, as training does, and saves them."""
    for name in names:
        source, folder = root / name, root / f"{name}-run"
        model = model_from_hf(source)
        first = {"decoder_first_pipeline_num_layers": 2} if model.num_layers % 2 else {}
        config = config_of(
            Case().but(parallel={SHORT_NAMES[key]: size for key, size in SIZES.items()} | first)
        )
        checkpoint = replace(config.checkpoint, pretrained_checkpoint=str(source))
        config = replace(config, model=model, checkpoint=checkpoint)
        inputs = RunInputs(RunFolder(folder), DatasetSplits(UnevenDataset(), None, None))
        run = build_run(
            plan_run(config, ctx.topology.world_size, rank=ctx.rank), inputs, context=ctx
        )
        save_step(ctx, run)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Hugging Face folder of a model of each family, and the run that imported
    it.
    """
    root = tmp_path_factory.mktemp("imported")
    for name in FIRST.values():
        write_source(name, root / name)
    run_ranks(4, save_imported, root, list(FIRST.values()), **SIZES)
    return root


# Names that transformers 5 saves in families where the published ones are written; no layer has
# both names.
SAVED = {
    "kimi_linear": (r"block_sparse_moe\.(?=gate_proj|up_proj|down_proj)", "mlp."),
    "deepseek_v4": (r"^head\.", "lm_head."),
    "olmo_hybrid": (r"(layers\.3\.)feedforward_layer_norm", r"\1post_attention_layernorm"),
}


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_folder(out: Path, source: Path) -> None:
    """Assert that names, dtypes and bytes of all tensors are equal, and all other files but the
    model card.
    """
    actual, renamed = stored_tensors(out), SAVED.get(read_config(source)["model_type"], ("$^", ""))
    expected = {re.sub(*renamed, name): tensor for name, tensor in stored_tensors(source).items()}
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert torch.equal(
            *(each.flatten().view(torch.uint8) for each in (actual[name], tensor))
        ), name
    for file in ("config.json", *TOKENIZER):
        assert (out / file).read_bytes() == (source / file).read_bytes(), file


OTHERS = [name for name in CONFIGS if name not in FIRST.values()]
IN_SUITE = OTHERS[::5]


@pytest.mark.parametrize(
    "name",
    [*FIRST.values(), *IN_SUITE, *with_mark(name for name in OTHERS if name not in IN_SUITE)],
)
def test_import_then_export_is_the_identity(name: str, imported: Path, tmp_path: Path) -> None:
    if name in FIRST.values():
        source, checkpoint, dtype = imported / name, imported / f"{name}-run" / STEP, "fp32"
    else:
        source, checkpoint, dtype = tmp_path / "in", tmp_path / "step-00000000", "bf16"
        import_hf(write_source(name, source, dtype=torch.bfloat16), checkpoint)
    assert len(list(source.glob("*.safetensors"))) > 1
    export_checkpoint(checkpoint, tmp_path / "out", dtype=dtype)
    assert_same_folder(tmp_path / "out", source)


def test_every_family_is_among_the_models() -> None:
    kinds = {
        getattr(transformers, CONFIG_CLASSES.get(name, f"{name}Config")).model_type
        for name in FIRST
    }
    assert kinds == FAMILIES.keys() - {"kimi_k2"}  # a DeepSeek-V3
