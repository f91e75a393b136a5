"""Generated Hugging Face folders, read by transformers and by nanotrain.

    python -m scripts.hf_folders [rope | fields] [FAMILY ...] [--all]

rope     families x forms of rotary positions x tied, untied and differing heads x sets of files
fields   families x entries that transformers' config class declares, each with other values

Each folder must give logits equal to those of transformers, within 1e-4 of the largest one, or be
refused by name; else it is silent, and the exit code is 1. Folders that nanotrain reads and
transformers fails on have no logits to compare with. Models are tiny and random, and folders are
in memory. `--all` prints the outcome of each folder.
"""

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from nanotrain.errors import NanotrainError
from nanotrain.inference.checkpoint import load_stage, open_model
from nanotrain.interop.hf.config_class import understand
from tests.interop.hf.configs import CONFIG_CLASSES, CONFIGS
from tests.interop.hf.reference import reference
from tests.model.building import VOCAB

Raw = dict[str, Any]
TOLERANCE = 1e-4  # of the largest logit
TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
EQUAL, REFUSED, SILENT = "equal", "refused by name", "SILENT"
NO_LOGITS = "transformers fails"
TRACEBACK = "TRACEBACK"
HEADS = ("tied", "untied", "differing")
FILES = ("single", "index", "both")
OTHER_ROPE = {"rope_type": "linear", "factor": 3.0, "rope_theta": 3e4}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD_YARN = {"type": "yarn", "factor": 4.0}
ORIGINALS = {"original_max_position_embeddings": 16}
OTHER_ORIGINALS = {"original_max_position_embeddings": 8}
LAYERED = {
    "full_attention": YARN | ORIGINALS | {"rope_theta": 2e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
LAYERED_LINEAR = {
    "full_attention": OTHER_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
# Entries about rotary positions in place of those of the family; `rope_parameters` is left out.
ROPE_FORMS: dict[str, Raw] = {
    "none": {},
    "top-level base": {"rope_theta": 5e5},
    "null": {"rope_parameters": None, "rope_scaling": None},
    "linear in rope_scaling": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "linear, base beside": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 3e4},
    "llama3, originals inside": {"rope_scaling": LLAMA3 | ORIGINALS, "rope_theta": 3e4},
    "llama3, originals beside": {"rope_scaling": LLAMA3, "rope_theta": 3e4} | ORIGINALS,
    "llama3, no originals": {"rope_scaling": LLAMA3},
    "yarn, originals inside": {"rope_scaling": OLD_YARN | ORIGINALS},
    "yarn, originals beside": {"rope_scaling": OLD_YARN} | ORIGINALS,
    "yarn, originals twice": {"rope_scaling": OLD_YARN | OTHER_ORIGINALS} | ORIGINALS,
    "yarn, no originals": {"rope_scaling": OLD_YARN, "rope_theta": 3e4},
    "yarn, factor of scores": {"rope_parameters": YARN | ORIGINALS | {"attention_factor": 1.3}},
    "yarn, mscale": {"rope_parameters": YARN | ORIGINALS | {"mscale": 1.2, "mscale_all_dim": 0.7}},
    "yarn, one mscale": {"rope_parameters": YARN | ORIGINALS | {"mscale": 1.2}},
    "yarn, betas": {"rope_parameters": YARN | ORIGINALS | {"beta_fast": 8, "truncate": False}},
    "yarn, null factor": {"rope_parameters": YARN | ORIGINALS | {"factor": None}},
    "new table": {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    "new table without a kind": {"rope_parameters": {"rope_theta": 3e4}},
    "new table without a base": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4},
    "bases that differ": {"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 5e5},
    "tables that differ": {"rope_parameters": LLAMA3 | ORIGINALS, "rope_scaling": OTHER_ROPE},
    "fraction inside": {"rope_parameters": {"rope_theta": 3e4, "partial_rotary_factor": 0.5}},
    "fraction beside": {"rope_theta": 3e4, "partial_rotary_factor": 0.5},
    "fractions that differ": {
        "rope_parameters": {"rope_theta": 3e4, "partial_rotary_factor": 0.5},
        "partial_rotary_factor": 1.0,
    },
    "per kind of layer": {"rope_parameters": LAYERED},
    "per kind of layer, linear": {"rope_parameters": LAYERED_LINEAR},
    "per kind of layer, base beside": {
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}},
        "rope_theta": 3e4,
        "rope_local_base_freq": 5e3,
    },
    "local base": {"rope_theta": 3e4, "rope_local_base_freq": 5e3},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
}
ROPE_ENTRIES = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "original_max_position_embeddings",
)


# Entries that code of some family reads although a class need not declare them.
UNDECLARED = (
    "attention_chunk_size",
    "attention_bias",
    "clip_qkv",
    "final_logit_softcapping",
    "head_dim",
    "is_causal",
    "layer_types",
    "logit_scale",
    "mlp_bias",
    "mlp_layer_types",
    "num_key_value_heads",
    "partial_rotary_factor",
    "qk_layernorm",
    "router_bias",
    "sliding_window",
    "use_bidirectional_attention",
    "use_qk_norm",
)
NOT_VARIED = {
    "architectures",
    "dtype",
    "model_type",
    "transformers_version",
    "id2label",
    "label2id",
}
TEXTS = ("silu", "gelu", "relu", "gelu_pytorch_tanh", "relu2", "softmax", "sigmoid", "rope", "nope")
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
MLP_KINDS = ("dense", "sparse")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embeddings.weight", "embed_in.weight")
HEADS_OF_FILES = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class Case:
    """A folder of a family with an edit, described by its name."""

    family: str
    name: str
    raw: Raw
    head: str = "as saved"
    files: str = "single"


@dataclass(frozen=True)
class Saved:
    """A model as transformers saves it."""

    raw: Raw
    tensors: dict[str, torch.Tensor]


def bases() -> dict[str, str]:
    """One tested configuration of every family, by its `model_type`."""
    chosen: dict[str, str] = {}
    for name, (family, _) in CONFIGS.items():
        config_class = getattr(transformers, CONFIG_CLASSES.get(family, f"{family}Config"))
        chosen.setdefault(config_class.model_type, name)
    return chosen


@cache
def saved(name: str) -> Saved:
    """The config.json and the tensors of a tested configuration."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        reference(name).save_pretrained(folder)
        raw = json.loads(Path(folder, "config.json").read_text())
        return Saved(raw, load_file(Path(folder, "model.safetensors")))


def rope_cases(family: str, name: str) -> Iterator[Case]:
    """Every form of rotary positions; heads and sets of files take turns."""
    raw = {entry: value for entry, value in saved(name).raw.items() if entry not in ROPE_ENTRIES}
    rests = cycle(product(HEADS, FILES))
    for form, entries in ROPE_FORMS.items():
        head, files = next(rests)
        tied = {"tie_word_embeddings": head != "untied"}
        yield Case(family, f"{form}; {head}; {files}", raw | entries | tied, head, files)


def field_cases(family: str, name: str) -> Iterator[Case]:
    """Every declared entry with other values, and entries that code reads undeclared."""
    raw = saved(name).raw
    declared = dict(understand(raw))
    for entry in UNDECLARED:
        declared.setdefault(entry, None)
    for entry in sorted(declared.keys() - NOT_VARIED):
        for value in other_values(entry, declared[entry]):
            yield Case(family, f"{entry}: {value!r}"[:70], raw | {entry: value})


def other_values(entry: str, value: Any) -> list[Any]:
    """Other values of an entry, some of which its class may refuse."""
    if isinstance(value, bool | int | float):
        return _other_numbers(value)
    if isinstance(value, str):
        return [text for text in TEXTS if text != value]
    if isinstance(value, dict):
        return [value | {key: other} for key in value for other in other_values(key, value[key])]
    if isinstance(value, list):
        return list(_other_lists(value))
    if entry.endswith("layer_types"):
        return []
    return [True, 2, 0.5]


def _other_numbers(value: bool | int | float) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(1, value // 2), 0]
    return [value * 1.7 + 0.1, 0.0]


def _other_lists(value: list[Any]) -> Iterator[list[Any]]:
    yield value[::-1]
    yield []
    for index, item in enumerate(value[:2]):
        kinds = [kind for kind in (*LAYER_KINDS, *MLP_KINDS) if kind != item]
        others: list[Any] = kinds if isinstance(item, str) else other_values("", item)
        for other in others:
            yield [*value[:index], other, *value[index + 1 :]]


def write_folder(case: Case, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a case; where there are two sets of weights, the second has other values."""
    tensors = dict(tensors)
    embedding = next(name for name in tensors if name.endswith(EMBEDDINGS))
    head = next((name for name in HEADS_OF_FILES if name in tensors), HEADS_OF_FILES[0])
    if case.head == "tied":
        tensors.pop(head, None)
    elif case.head in ("untied", "differing"):
        tensors[head] = tensors[embedding].flip(0).contiguous()
    (folder / "config.json").write_text(json.dumps(case.raw))
    if case.files != "index":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if case.files == "both":
        tensors = {name: tensor * 1.5 for name, tensor in tensors.items()}
    if case.files != "single":
        _write_shards(tensors, folder)


def _write_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    names = sorted(tensors)
    weight_map = {}
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[number::2]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def outcome(case: Case, tensors: dict[str, torch.Tensor]) -> tuple[str, str]:
    """What becomes of a folder, and why."""
    folder = Path(tempfile.mkdtemp(dir=_memory()))
    try:
        write_folder(case, tensors, folder)
        return _compare(folder)
    finally:
        shutil.rmtree(folder)


def _compare(folder: Path) -> tuple[str, str]:
    try:
        with torch.no_grad():
            ours = load_stage(open_model(folder)).logits(TOKENS)
    except NanotrainError as error:
        return REFUSED, str(error)
    except Exception as error:  # a user would see its traceback
        return TRACEBACK, f"{type(error).__name__}: {error}"
    theirs, reason = _their_logits(folder)
    if theirs is None:
        return NO_LOGITS, reason
    ours = ours[..., : theirs.shape[-1]]
    if ours.shape != theirs.shape:
        return SILENT, f"logits {list(ours.shape)} and {list(theirs.shape)}"
    largest = max(1.0, float(theirs.abs().max()))
    difference = float((ours - theirs).abs().max()) / largest
    return (
        (EQUAL, "") if difference <= TOLERANCE else (SILENT, f"logits differ by {difference:.2g}")
    )


def _their_logits(folder: Path) -> tuple[torch.Tensor | None, str]:
    try:
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        # of its model_type, which may be another than that of the architecture
        config = transformers.AutoConfig.from_pretrained(folder)
        model, info = getattr(transformers, architecture).from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True
        )
        missing = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
        if missing:
            return None, f"no values for {missing[0]}"
        with torch.no_grad():
            logits: torch.Tensor = model.eval()(TOKENS, use_cache=False).logits
    except Exception as error:  # the library raises many
        return None, " ".join(str(error).split())[:120]
    return logits, ""


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


CASES: dict[str, Callable[[str, str], Iterator[Case]]] = {"rope": rope_cases, "fields": field_cases}


def count(kind: str, families: list[str], *, shows_all: bool = False) -> Counter[str]:
    """Print the outcomes of all folders of a kind; returns their numbers."""
    total: Counter[str] = Counter()
    for family, name in bases().items():
        if families and family not in families:
            continue
        counts: Counter[str] = Counter()
        for case in CASES[kind](family, name):
            result, why = outcome(case, saved(name).tensors)
            counts[result] += 1
            if shows_all or result not in (EQUAL, REFUSED):
                print(f"  {family}: {case.name}: {result}: {why}", flush=True)
        print(f"{kind} {family}: {_as_text(counts)}", flush=True)
        total += counts
    print(f"{kind}: {total.total()} folders, {_as_text(total)}", flush=True)
    return total


def _as_text(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))


def quiet() -> None:
    """Let transformers print errors alone."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def main(words: list[str]) -> int:
    """Count the folders of the kinds and families that are named, or of all."""
    quiet()
    names = [word for word in words if not word.startswith("-")]
    kinds = [name for name in names if name in CASES] or list(CASES)
    families = [name for name in names if name not in CASES]
    has_silent = False
    for kind in kinds:
        total = count(kind, families, shows_all="--all" in words)
        has_silent = has_silent or total[SILENT] > 0 or total[TRACEBACK] > 0
    return int(has_silent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
