"""Texts of every layout with pipeline or context parallelism are those of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.cli.generate import generation_config, load_on_rank
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.errors import ConfigError
from nanotrain.inference.checkpoint import load_checkpoint, open_model
from nanotrain.inference.sampling import Sampling
from tests.harness import run_ranks
from tests.inference.test_checkpoint import write_run
from tests.laws.test_task_rows import CP, EP, KINDS, PP, SIZES, TP

PROMPTS = ["abc", "a longer one"]
SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=3))
LAYOUTS = {
    "pp 2": (f"{PP} 2", {"pp": 2}),
    "cp 2": (f"{CP} 2", {"cp": 2}),
    "pp 2 tp 2": (f"{PP} 2 {TP} 2", {"pp": 2, "tp": 2}),
    "pp 2 cp 2": (f"{PP} 2 {CP} 2", {"pp": 2, "cp": 2}),
    "cp 2 tp 2": (f"{CP} 2 {TP} 2", {"cp": 2, "tp": 2}),
    "pp 2 ep 2": (f"{PP} 2 {EP} 2", {"pp": 2, "ep": 2}),
    "cp 2 ep 2": (f"{CP} 2 {EP} 2", {"cp": 2, "ep": 2}),
}
NUM_TOKENS = 5
TEXTS = [[1, 2, 3], list(range(15))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of every kind of layer, with few positions."""
    folder = tmp_path_factory.mktemp("kinds")
    sizes = SIZES | {"vocab_size": 257, "max_position_embeddings": 15}
    for kind, options in KINDS.items():
        write_run(folder / kind, **sizes, **options)
    write_run(folder / "learned", **sizes, position_embedding_type="learned_absolute")
    return folder


def texts_of(model: Any) -> list[str]:
    """Greedy and sampled texts of two prompts, which grow beyond the positions."""
    texts = []
    for sampling in SAMPLINGS:
        pieces = list(model.stream(PROMPTS, num_tokens=NUM_TOKENS, sampling=sampling))
        for index in range(len(PROMPTS)):
            texts.append("".join(piece for row, piece in pieces if row == index))
    return texts


def texts_here(ctx: ParallelContext, folder: Path, kinds: list[str], flags: str) -> Any:
    """The texts on this rank, and the logits of a text."""
    results = {}
    for kind in kinds:
        opened = open_model(folder / kind)
        loaded = load_line(parse(flags.split()), to_train=False)
        config = generation_config(opened.config, loaded, world_size=ctx.topology.world_size)
        model = load_on_rank(opened.with_model(config.model), config, tokenizer=None, context=ctx)
        assert model.layout is not None
        results[kind] = texts_of(model), model.layout.next_logits(TEXTS)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_and_logits_are_those_of_one_rank(folder: Path, layout: str) -> None:
    flags, sizes = LAYOUTS[layout]
    kinds = [kind for kind in [*KINDS, "learned"] if "ep" not in sizes or "experts" in kind]
    first = 2 * list(LAYOUTS).index(layout) if len(kinds) > 2 else 0
    chosen = [kinds[(first + offset) % len(kinds)] for offset in range(3 if first < 2 else 2)]
    # experts are shared by the ranks of a stage that cp shares, or by two more
    world_size = 2 if layout in ("pp 2", "cp 2", "cp 2 ep 2") else 4
    replies = run_ranks(world_size, texts_here, folder, chosen, flags, **sizes)
    for kind in chosen:
        model = load_checkpoint(folder / kind)
        expected = texts_of(model)
        for reply in replies:
            texts, logits = reply[kind]
            assert texts == expected, kind
            for row, text in enumerate(TEXTS):
                own = model.model.logits(torch.tensor([text]), last_only=True)[0, 0].detach()
                torch.testing.assert_close(logits[row], own, rtol=1e-5, atol=2e-5)


def test_experts_with_a_capacity_are_refused(tmp_path: Path) -> None:
    write_run(
        tmp_path, moe={"num_experts": 4, "ffn_hidden_size": 16, "expert_capacity_factor": 1.0}
    )
    loaded = load_line(parse([PP, "2"]), to_train=False)
    with pytest.raises(ConfigError, match="moe.expert_capacity_factor"):
        generation_config(open_model(tmp_path).config, loaded, world_size=2)
