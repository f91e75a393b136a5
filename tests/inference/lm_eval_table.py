"""Log-likelihoods of lm-eval's own HFLM and of nanotrain on tiny Hugging Face folders.

python -m tests.inference.lm_eval_table             the largest difference of each folder
python -m tests.inference.lm_eval_table --record    also writes lm_eval_values.json
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanotrain.data.prompts import encode_pair, encode_prompt, prompt_start
from nanotrain.inference.checkpoint import load_checkpoint
from nanotrain.inference.score import log_likelihoods, rolling_windows
from tests.inference.tiny_folders import KINDS, write_folder

RECORDED = Path(__file__).with_name("lm_eval_values.json")
MAX_LENGTH = 32  # positions of the folders
# an empty context, blanks at its end, several tokens, the start written out, more than the window
PAIRS = [
    ("the quick", " brown fox"),
    ("", "the lazy dog"),
    ("the quick ", "brown"),
    ("a cat sat   ", " on the mat and"),
    ("the quick brown fox jumps over the lazy dog " * 4, "a cat sat"),
    ("a cat sat", "!"),
    ("a", "</s>"),
    ("<s>the quick", " fox"),
    ("", "<s>the"),
    ("", "<|endoftext|>the"),
    ("hé ", "日本"),
    ("the\n", "\nfox"),
]
TEXTS = ["", "a", "<s>the quick brown fox", "the quick brown fox jumps over the lazy dog " * 5]


def import_hflm() -> Any:
    """lm-eval's model class; what it imports from accelerate is for several processes only."""
    if importlib.util.find_spec("accelerate") is not None:
        from lm_eval.models.huggingface import HFLM

        return HFLM
    unused = types.ModuleType("accelerate")
    unused.__dict__.update(
        Accelerator=None, InitProcessGroupKwargs=None, find_executable_batch_size=None
    )
    memory = types.ModuleType("accelerate.utils")
    memory.__dict__.update(get_max_memory=None)
    sys.modules |= {"accelerate": unused, "accelerate.utils": memory}
    try:
        from lm_eval.models.huggingface import HFLM
    finally:
        del sys.modules["accelerate"], sys.modules["accelerate.utils"]
    return HFLM


def scores_of(model: Any) -> list[float]:
    """The log-likelihoods of the pairs, then the rolling ones of the texts, by an lm-eval model."""
    from lm_eval.api.instance import Instance

    pairs = [Instance("loglikelihood", {}, pair, 0) for pair in PAIRS]
    texts = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in TEXTS]
    return [score for score, _ in model.loglikelihood(pairs)] + model.loglikelihood_rolling(texts)


def lm_eval_model(folder: Path) -> Any:
    """A folder in lm-eval's own class."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return import_hflm()(pretrained=model, tokenizer=tokenizer, batch_size=4)


def lm_eval_scores(folder: Path) -> list[float]:
    """The scores by lm-eval's own class."""
    return scores_of(lm_eval_model(folder))


def own_scores(folder: Path) -> list[float]:
    """The scores by nanotrain, without lm-eval."""
    loaded = load_checkpoint(folder)
    requests = [encode_pair(*pair, tokenizer=loaded.tokenizer) for pair in PAIRS]
    (start,) = prompt_start(loaded.tokenizer)
    counts = []
    for text in TEXTS:
        tokens = encode_prompt(text, loaded.tokenizer)
        windows = list(rolling_windows(tokens, prefix=start, max_length=MAX_LENGTH))
        requests += windows
        counts.append(len(windows))
    scored = log_likelihoods(loaded.model, requests, batch_size=4, max_length=MAX_LENGTH)
    values = [score.log_likelihood for score in scored]
    totals = values[: len(PAIRS)]
    first = len(PAIRS)
    for count in counts:
        totals.append(sum(values[first : first + count]))
        first += count
    return totals


def main() -> int:
    """Print the largest difference of each folder; 1 if one is above 1e-4."""
    values = {}
    worst = 0.0
    for name in KINDS:
        with TemporaryDirectory() as folder:
            path = write_folder(name, Path(folder))
            theirs = lm_eval_scores(path)
            differences = [abs(a - b) for a, b in zip(theirs, own_scores(path), strict=True)]
        values[name] = theirs
        worst = max(worst, *differences)
        print(f"{name:8}  {len(theirs)} log-likelihoods, largest difference {max(differences):.1e}")
    if "--record" in sys.argv[1:]:
        rounded = {name: [round(score, 6) for score in row] for name, row in values.items()}
        RECORDED.write_text(json.dumps(rounded, indent=1) + "\n")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
