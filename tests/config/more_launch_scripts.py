"""Further launch scripts, of forks and fine-tuning; as tests/config/launch_scripts.py."""

MORE_SCRIPTS: dict[str, tuple[int, str]] = {
    # Megatron-LM fine-tuned from GPT 843M, both position flags in this order
    "gpt_843m": (
        8,
        "--sequence-parallel --recompute-activations --use-flash-attn --apply-layernorm-1p "
        "--untie-embeddings-and-output-weights --disable-bias-linear --no-position-embedding "
        "--use-rotary-position-embeddings --rotary-percent 0.5 --swiglu --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --exit-duration-in-mins 220 --tensor-model-parallel-size 1 "
        "--pipeline-model-parallel-size 1 --save-interval 2000 --save ck --load ck --tensorboard-dir tb "
        "--log-validation-ppl-to-tensorboard --num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 128 "
        "--train-samples 25000000 --lr-decay-samples 23750000 --lr-warmup-samples 16667 --lr 2.5e-5 "
        "--min-lr 2.5e-6 --lr-decay-style cosine --log-interval 100 --eval-iters 32 --eval-interval 1260 "
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer",
    ),
    # Qwen3 30B-A3B with capacity and a precision-aware optimizer
    "qwen3_30b_a3b_capacity": (
        64,
        "--seq-length 8192 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
        "--moe-ffn-hidden-size 768 --num-attention-heads 32 --max-position-embeddings 262144 "
        "--num-query-groups 4 --group-query-attention --normalization RMSNorm --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --kv-channels 128 --num-experts 128 --moe-router-topk 8 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
        "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1 "
        "--moe-pad-expert-input-to-capacity --moe-permute-fusion --moe-grouped-gemm "
        "--moe-layer-freq '([1]*48)' --transformer-impl transformer_engine --use-mcore-models "
        "--micro-batch-size 1 --global-batch-size 128 --train-iters 100000 --weight-decay 0.01 "
        "--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.008 --clip-grad 1.0 --bf16 "
        "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --swiglu --qk-layernorm "
        "--rotary-base 1000000 --lr 1.0e-5 --lr-decay-style cosine --min-lr 1.0e-6 --lr-warmup-iters 100 "
        "--lr-decay-iters 99900 --ckpt-format torch_dist --ddp-average-in-collective --overlap-grad-reduce "
        "--overlap-param-gather --use-precision-aware-optimizer --main-grads-dtype bf16 "
        "--main-params-dtype fp16 --enable-cuda-graph --te-rng-tracker --disable-msc "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --context-parallel-size 1 --use-distributed-optimizer "
        "--sequence-parallel --tokenizer-model tokenizer --data-path data --split 949,50,1 --log-throughput "
        "--eval-iters 10 --log-interval 1 --save-interval 1000000 --eval-interval 10000 --save out --load ck "
        "--ckpt-fully-parallel-load --no-load-optim --no-load-rng --no-save-optim --tensorboard-dir tb "
        "--num-workers 2",
    ),
}
