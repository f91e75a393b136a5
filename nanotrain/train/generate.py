"""The next token's logits in a layout with pipeline or context parallelism, for generation.

    texts -> one microbatch, padded to a length that the ranks can share -> forward schedule
    -> hidden state of the last token of each text, on the rank that holds it -> logits on all ranks

Nothing is kept between two tokens: each reads the whole texts again. Layers need no further code,
because a pass is that of an evaluation.

    B texts   S their padded length   V vocabulary
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.rules.layout import sequence_parts, shortest_sequence
from nanotrain.config.rules.settings import Settings
from nanotrain.data.batch import Batch
from nanotrain.inference.checkpoint import (
    LoadedModel,
    OpenedCheckpoint,
    generation_defaults,
    load_prompt_tokenizer,
)
from nanotrain.model.context import BatchContext
from nanotrain.model.transformer import Stage
from nanotrain.parallel.cp.split import split_batch
from nanotrain.parallel.pp.executor import RunnableStage, run_forward
from nanotrain.plan.plan import Plan
from nanotrain.quantities import round_up
from nanotrain.spec.residuals import stream_width
from nanotrain.train.build import build_pipeline
from nanotrain.train.evaluate import load_stages


class _StageOfLogits(nn.Module):
    """A stage that returns no loss: the last one keeps the hidden states of all tokens.

    Args:
        stage: the stage.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.last_hidden: Tensor | None = None  # [B, S/cp, H] of the last pass, with the head

    def forward(self, hidden: Tensor | None, context: BatchContext) -> Tensor:
        """Hidden states for the next stage; with the head a loss of 0."""
        hidden = self.stage.transform(hidden, context)
        if self.stage.head is None:
            return hidden
        self.last_hidden = hidden
        return hidden.new_zeros((), dtype=torch.float32)


class LayoutModel:
    """A model in a layout, for the logits of the token after each text.

    Args:
        stages: stages of this rank, with their weights.
        plan: plan of this rank with one microbatch.
        context: device and groups.
    """

    def __init__(
        self, stages: Mapping[int, RunnableStage], *, plan: Plan, context: ParallelContext
    ) -> None:
        self.model_config = plan.config.model
        self._plan = plan
        self._context = context
        self._pipeline = build_pipeline(plan, context)
        self._modules = {}
        self._stages = {}
        for index, stage in stages.items():
            assert isinstance(stage.module, Stage)
            module = _StageOfLogits(stage.module)
            self._modules[index] = module
            self._stages[index] = RunnableStage(module, message_widths=stage.message_widths)
        rules = Settings(plan.config)
        self._parts = sequence_parts(rules)
        self._shortest = shortest_sequence(rules)

    @torch.no_grad()
    def next_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[B, V] fp32 on the CPU, equal on every rank. Collective."""
        plan = self._plan
        longest = max(map(len, texts))
        length = max(round_up(longest, self._parts), self._shortest)
        batch = split_batch(self._pad(texts, length), self._context.group("cp"))
        microbatch = BatchContext.of(batch, cp=self._context.group("cp"))
        width = stream_width(plan.shape)
        shape = (len(texts), length // plan.num_sequence_shards, width)
        self._context.heartbeat.begin("validation")
        run_forward(
            plan.valid_schedule,
            self._stages,
            microbatches=[microbatch],
            pipeline=replace(self._pipeline, hidden_shape=shape),
        )
        logits = torch.zeros(
            len(texts), plan.shape.vocab_size, dtype=torch.float32, device=self._context.device
        )
        self._fill(logits, last=[len(text) - 1 for text in texts], microbatch=microbatch)
        all_reduce(logits, self._context.group("world"))
        return logits.cpu()

    def _pad(self, texts: Sequence[Sequence[int]], length: int) -> Batch:
        """The texts, padded on the right to `length` tokens, where no earlier token attends."""
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        batch = Batch.from_tokens(tokens.to(self._context.device))
        positions = self.model_config.max_position_embeddings
        if length > positions:  # padding only; tables of positions end there
            ids = torch.arange(length, device=self._context.device).clamp(max=positions - 1)
            batch = replace(batch, position_ids=ids.expand(len(texts), length).contiguous())
        return batch

    def _fill(self, logits: Tensor, *, last: Sequence[int], microbatch: BatchContext) -> None:
        """Write the logits of the texts whose last token this rank holds; one rank has each."""
        for module in self._modules.values():
            hidden = module.last_hidden
            if hidden is None:
                continue
            positions = microbatch.sequence_positions
            if positions is None:
                positions = torch.arange(hidden.shape[1], device=hidden.device)
            is_last = positions == torch.tensor(last, device=hidden.device)[:, None]
            rows, columns = is_last.nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            local_logits = module.stage.project(hidden[rows, columns][:, None])[:, 0].float()
            if self._context.group("tp").is_first and self._context.group("dp").is_first:
                logits[rows] = local_logits


def load_layout(
    model: OpenedCheckpoint, *, tokenizer: str | None, plan: Plan, context: ParallelContext
) -> LoadedModel:
    """Load a model in the layout of a plan, for generation.

    Args:
        model: a checkpoint of any layout, or a Hugging Face folder.
        tokenizer: name or path, as `load_tokenizer` takes it; None for the model's.
        plan: plan of this rank with one microbatch.
        context: device and groups.
    """
    loaded = load_prompt_tokenizer(model, tokenizer)
    defaults = generation_defaults(model, loaded)
    stages = load_stages(model, plan=plan, context=context)
    first_module = next(iter(stages.values())).module
    return LoadedModel(
        model.path,
        plan.config,
        first_module,
        loaded,
        context.group("world"),
        defaults,
        layout=LayoutModel(stages, plan=plan, context=context),
    )
