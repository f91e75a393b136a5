"""Forward and backward of the model, compared with the plain Llama of baselines.py: same sizes,
same tokens.

    python benchmarks/model.py                          # 25m, fp32 and bf16, two threads
    python benchmarks/model.py --model 110m --rounds 20

Both sides run in turn in one process, so a slow minute of the machine affects both. As users of
each do, nanotrain has bf16 parameters, and the plain Llama fp32 parameters under autocast. The
table shows median wall time and median CPU time of all threads, which other programs disturb far
less.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from baselines import SHAPES, Llama, Shape, autocast_on, batches
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from nanotrain.model.parameters import initialize
from nanotrain.model.transformer import Stage, build_stage

DTYPES = ("fp32", "bf16")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Times:
    """Seconds of one forward and backward."""

    clock: float
    cpu: float


def model_config(shape: Shape) -> ModelConfig:
    """nanotrain's model of a shape."""
    return ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        max_position_embeddings=shape.seq,
        vocab_size=shape.vocab,
        untie_embeddings_and_output_weights=not shape.tied,
    )


def nanotrain_pass(shape: Shape, tokens: Tensor, *, dtype: str) -> Callable[[], float]:
    """A function that runs forward and backward of nanotrain's model and returns the loss."""
    stage = build_stage(model_config(shape), dtype=dtype).to_empty(device="cpu")
    initialize(stage, stage.params, seed=0)
    return stage_pass(stage, tokens)


def stage_pass(stage: Stage, tokens: Tensor) -> Callable[[], float]:
    """A function that runs forward and backward of a stage with the whole model and returns the
    loss.
    """
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = BatchContext(Batch(inputs, labels, torch.ones(inputs.shape), None, None))

    def run() -> float:
        loss = stage(None, batch) / inputs.numel()
        loss.backward()
        return drop_gradients(stage, loss)

    return run


def plain_pass(shape: Shape, tokens: Tensor, *, dtype: str) -> Callable[[], float]:
    """A function that runs forward and backward of the plain Llama and returns the loss."""
    torch.manual_seed(0)
    model, context = Llama(shape), autocast_on(CPU, dtype == "bf16")

    def run() -> float:
        with context():
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        return drop_gradients(model, loss)

    return run


def drop_gradients(model: nn.Module, loss: Tensor) -> float:
    for parameter in model.parameters():
        parameter.grad = None
    return loss.item()


def timed(run: Callable[[], float]) -> Times:
    clock, cpu = time.perf_counter(), time.process_time()
    run()
    return Times(time.perf_counter() - clock, time.process_time() - cpu)


def compare(shape: Shape, *, dtype: str, rounds: int) -> str:
    """One row of the table."""
    tokens = next(batches(shape, 0, CPU))
    ours, plain = nanotrain_pass(shape, tokens, dtype=dtype), plain_pass(shape, tokens, dtype=dtype)
    losses = [ours(), plain()]
    assert abs(losses[0] - losses[1]) < 0.1 * losses[1], (
        f"untrained models should have similar losses: {losses}"
    )
    ours(), plain()
    pairs = [(timed(ours), timed(plain)) for _ in range(rounds)]
    cells = [dtype]
    for measure in ("clock", "cpu"):
        ours_s, plain_s = ([getattr(pair[side], measure) for pair in pairs] for side in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(ours_s, plain_s, strict=True))
        cells += [f"{statistics.median(side) * 1e3:.0f} ms" for side in (ours_s, plain_s)] + [
            f"{ratio:.2f}x"
        ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run both sides in turn and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="25m")
    parser.add_argument("--dtype", choices=(*DTYPES, "both"), default="both")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"{args.model}, {args.threads} threads, medians of {args.rounds} rounds; ratio: plain / nanotrain\n"
    )
    print(
        "| dtype | nanotrain | plain | speed-up | nanotrain, CPU time | plain, CPU time | speed-up |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for dtype in DTYPES if args.dtype == "both" else (args.dtype,):
        print(compare(SHAPES[args.model], dtype=dtype, rounds=args.rounds), flush=True)


if __name__ == "__main__":
    main()
