"""The model class of EleutherAI's lm-eval: `nanotrain`, for checkpoints and Hugging Face folders.

    nanotrain evaluate runs/tiny --tasks arc_easy,lambada_openai python -m
    nanotrain.inference.lm_eval run --model nanotrain --model_args path=runs/tiny --tasks arc_easy

The second line is lm-eval's own command line with the model registered. Needs `pip install
nanotrain[lm-eval]`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from nanotrain.data.prompts import encode_pair, encode_prompt, prompt_start
from nanotrain.errors import ConfigError, DataError
from nanotrain.inference.checkpoint import (
    LoadedModel,
    load_checkpoint,
    open_model,
    tokenizer_name,
)
from nanotrain.inference.generate import Generation, stream_texts
from nanotrain.inference.sampling import Sampling
from nanotrain.inference.score import log_likelihoods, rolling_windows
from nanotrain.prepare.chat import ChatTemplate

MAX_NEW_TOKENS = 256  # most tokens of a generated text if a task sets no number
# names of that number in tasks, the first that is set counts
LENGTH_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("nanotrain")
class NanotrainLM(LM):
    """A model on one device.

    Args:
        path: run folder, step folder or Hugging Face folder.
        tokenizer: name or path of a tokenizer, as `load_tokenizer` takes it; None for the model's.
        ema: whether the moving average of the weights is taken.
        batch_size: rows per forward pass.
        device: device of the model.
        max_length: input tokens at most; None for the sequence length of the training run, or the
            positions of a Hugging Face folder, as in lm-eval.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str | None = None,
        ema: bool = False,
        batch_size: int | str = 8,
        device: str | None = None,
        max_length: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        unused.pop("max_batch_size", None)  # lm-eval passes it to every model
        if any(value is not None for value in unused.values()):
            names = ", ".join(sorted(unused))
            raise ValueError(f"nanotrain's model takes no {names}")
        self.loaded: LoadedModel = load_checkpoint(path, tokenizer=tokenizer, ema=ema)
        name = tokenizer or tokenizer_name(open_model(Path(path), ema=ema))
        self._tokenizer_source = str(name)
        self._chat: ChatTemplate | None = None
        self.loaded.model.to(device or "cpu")
        self.batch_size = int(batch_size)
        config = self.loaded.config
        is_run = self.loaded.is_run
        known = config.data.seq_length if is_run else config.model.max_position_embeddings
        self.max_length = max_length or known

    @property
    def chat(self) -> ChatTemplate:
        """The chat template of the model's folder."""
        if self._chat is None:
            self._chat = ChatTemplate(self._tokenizer_source)
        return self._chat

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template as lm-eval records it; a name of one among several is ignored."""
        return f"of {self._tokenizer_source}" if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without its system message where the template refuses one."""
        continues = not add_generation_prompt
        try:
            return self.chat.prompt(chat_history, continues=continues)
        except DataError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return self.chat.prompt(others, continues=continues)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """The log-likelihood of continuations, and whether each is the greedy one.

        Requests are (context, text).
        """
        tokenizer = self.loaded.tokenizer
        pairs = [encode_pair(*request.args, tokenizer=tokenizer) for request in requests]
        scored = log_likelihoods(
            self.loaded.model, pairs, batch_size=self.batch_size, max_length=self.max_length
        )
        scores = [(score.log_likelihood, score.is_greedy) for score in scored]
        for request, result in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of whole texts, however long, each alone; requests are (text,)."""
        scores = []
        for request in requests:
            tokens = encode_prompt(request.args[0], self.loaded.tokenizer)
            windows = list(rolling_windows(tokens, prefix=self._start, max_length=self.max_length))
            scored = log_likelihoods(
                self.loaded.model, windows, batch_size=self.batch_size, max_length=self.max_length
            )
            scores.append(sum(score.log_likelihood for score in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, scores[-1])
        return scores

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continue contexts up to one of the strings `until`; requests are (context, options)."""
        texts = []
        for request in requests:
            text = self._generate(*request.args)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    @property
    def tokenizer_name(self) -> str:
        """Part of the keys of lm-eval's caches."""
        return str(self.loaded.path)

    @property
    def _start(self) -> int:
        """The token before a text."""
        return prompt_start(self.loaded.tokenizer)[-1]

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        """The generated text for one request of lm-eval, cut at its stop strings."""
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        lengths = [options[name] for name in LENGTH_OPTIONS if options.get(name)]
        most = int(lengths[0]) if lengths else MAX_NEW_TOKENS
        # at least half of the input is the context
        num_tokens = min(most, self.max_length // 2)
        tokenizer = self.loaded.tokenizer
        tokens = encode_prompt(context, tokenizer) or [self._start]
        prompt = tokens[num_tokens - self.max_length :]
        sampling = self._sampling(options)
        generation = Generation(
            self.loaded.model, [prompt], num_tokens=num_tokens, sampling=sampling
        )
        pieces = stream_texts(generation, tokenizer, num_tokens=num_tokens, stops=stops)
        return "".join(piece for _, piece in pieces)

    def _sampling(self, options: Mapping[str, Any]) -> Sampling:
        """The sampling of a task: greedy unless it sets a temperature; the rest as its folder.

        Texts end at the folder's ends and at the end-of-document token, as in lm-eval.
        """
        defaults = self.loaded.defaults
        temperature = 0.0
        if options.get("do_sample", True):
            temperature = options.get("temperature") or 0.0
        eod = self.loaded.tokenizer.eod
        ends = {*defaults.ends, *([] if eod is None else [eod])}
        return Sampling(
            temperature,
            top_k=options.get("top_k", defaults.top_k),
            top_p=options.get("top_p", defaults.top_p),
            stop=tuple(sorted(ends)),
            repetition_penalty=options.get("repetition_penalty", defaults.repetition_penalty),
        )


def evaluate_tasks(
    model: LM,
    tasks: Sequence[str],
    *,
    include_path: str | None,
    num_fewshot: int | None,
    limit: int | None,
    chat: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run tasks of lm-eval; returns the metrics of each task by name.

    Args:
        model: a `NanotrainLM`.
        tasks: names of lm-eval or of files in `include_path`.
        include_path: folder with further tasks as YAML files.
        num_fewshot: examples before each question; None for the task's.
        limit: documents per task; None for all.
        chat: whether questions and examples are turns of a conversation, by the chat template.

    Raises:
        ConfigError: an unknown task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    has_all = set(tasks) <= set(manager.all_subtasks)
    if include_path is not None and not has_all:
        manager = TaskManager(include_path=include_path)  # seconds: lm-eval has thousands of files
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        names = ", ".join(unknown)
        raise ConfigError(
            f"--tasks: there is no task {names}",
            why="it is not in lm-eval's list",
            fix="`lm-eval ls tasks` lists them; --include-path adds a folder",
        )
    results = simple_evaluate(
        model,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    assert results is not None, "the first rank has the results"
    metrics: dict[str, dict[str, Any]] = results["results"]
    return metrics


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
