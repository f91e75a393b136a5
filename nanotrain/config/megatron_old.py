"""Rows of the table of Megatron-LM's flags: those of its earlier versions, which scripts and forks still have."""

from nanotrain.config import conversions
from nanotrain.config.megatron_kinds import MegatronFlag, always, no_effect, not_yet, rename, sets

TEXT_MODELS = "models are decoders of text: leave it out"

# fmt: off
OLD: dict[str, MegatronFlag] = {
    "--layernorm-epsilon": rename("--norm-epsilon with the same number", lambda config, text: {"norm_epsilon": text}),
    "--no-query-key-layer-scaling": no_effect("the softmax is the same with --apply-query-key-layer-scaling and without it"),
    "--no-contiguous-buffers-in-local-ddp": no_effect("parameters and gradients lie in flat buffers"),
    "--no-scatter-gather-tensors-in-pipeline": no_effect("with --sequence-parallel stages send shards of the sequence"),
    "--delay-grad-reduce": no_effect("buckets are reduced as they become ready"),
    "--no-delay-grad-reduce": no_effect("buckets are reduced as they become ready"),
    "--delay-param-gather": no_effect("parameters are gathered when the next forward needs them"),
    "--data-impl": always("token files are pairs of PREFIX.bin and PREFIX.idx, set by --data-path PREFIX", "mmap", "infer"),
    "--mmap-warmup": no_effect("token files are read, not mapped into memory"),
    "--override-lr-scheduler": always("the schedule follows from the command line, also on resume"),
    "--use-checkpoint-lr-scheduler": no_effect("the schedule follows from the command line; what differs from the checkpoint is printed on resume"),
    "--fp8-e4m3": sets("--fp8-format e4m3", fp8_format="e4m3"),
    "--fp8-hybrid": sets("--fp8-format hybrid", fp8_format="hybrid"),
    "--checkpoint-granularity": rename("--recompute-granularity with the same value", lambda config, text: {"recompute_granularity": text}),
    "--checkpoint-method": rename("--recompute-method with the same value", lambda config, text: {"recompute_method": text}),
    "--checkpoint-num-layers": rename("--recompute-num-layers with the same number", lambda config, text: {"recompute_num_layers": text}),
    "--checkpoint-activations": MegatronFlag("rename", "--recompute-granularity full, with --recompute-method uniform unless it is set", convert=conversions.checkpoint_activations, fields=("recompute_granularity",), is_check=True),
    "--use-flash-attn-v2": no_effect("--attention-backend auto takes flash kernels where they can be used"),
    "--use-flash-attn-triton": no_effect("--attention-backend auto takes flash kernels where they can be used"),
    "--tokenizer-name-or-path": rename("--tokenizer-model with the same folder", lambda config, text: {"tokenizer_model": text}),
    "--distribute-checkpointed-activations": not_yet("activations stay on the device: set --recompute-granularity"),
    "--standalone-embedding-stage": not_yet("set --pipeline-model-parallel-layout, such as 'E|tt|ttL'"),
    "--pipeline-model-parallel-split-rank": not_yet(TEXT_MODELS, arity=1),
    "--moe-extended-tp": not_yet("set --expert-tensor-parallel-size to the product of tensor- and expert-parallel ranks, and --expert-model-parallel-size 1"),
    "--s3-cache-path": not_yet("files are read and written by the file system: leave it out", arity=1),
}
# fmt: on
