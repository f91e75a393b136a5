"""Further launch scripts: of forks, fine-tuning and reinforcement learning, and of ModelOpt's
models.

As tests/config/launch_scripts.py. slime sets the lengths of sequences itself, and has flags that
are not Megatron-LM's, which are left out; the other examples have no flags of the run, which are
added at the end.
"""

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
    # GLM-4.5 106B-A12B: Megatron-LM's arguments of slime
    "glm4_5_106b_a12b": (
        64,
        "--disable-bias-linear --group-query-attention --num-attention-heads 96 --num-query-groups 8 "
        "--kv-channels 128 --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --add-qkv-bias "
        "--normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5 --swiglu "
        "--untie-embeddings-and-output-weights --vocab-size 151552 --rotary-base 1000000 --moe-ffn-hidden-size "
        "1408 --moe-shared-expert-intermediate-size 1408 --moe-router-pre-softmax --moe-router-score-function "
        "sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-load-balancing-type "
        "seq_aux_loss --moe-token-dispatcher-type alltoall --moe-router-topk 8 --moe-layer-freq [0]*1+[1]*45 "
        "--num-experts 128 --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --train-iters 1000 "
        "--global-batch-size 256 --bf16 --use-distributed-optimizer --save ck --save-interval 20 "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--context-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer adam --lr "
        "1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 "
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
        "--attention-softmax-in-fp32 --attention-backend flash --moe-token-dispatcher-type flex "
        "--moe-enable-deepep",
    ),
    # MiMo 7B with multi-token prediction: Megatron-LM's arguments of slime
    "mimo_7b_mtp": (
        8,
        "--swiglu --num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear "
        "--add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-05 --rotary-base 640000 --vocab-size 151680 "
        "--untie-embeddings-and-output-weights --max-position-embeddings 32768 --mtp-num-layers 1 --seq-length "
        "4096 --micro-batch-size 1 --train-iters 1000 --global-batch-size 256 --bf16 --use-distributed-optimizer "
        "--save ck --save-interval 20",
    ),
    # Moonlight 16B-A3B: Megatron-LM's arguments of slime
    "moonlight_16b_a3b": (
        32,
        "--disable-bias-linear --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads "
        "16 --kv-channels 128 --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-5 "
        "--rotary-percent 1.0 --swiglu --untie-embeddings-and-output-weights --no-masked-softmax-fusion "
        "--vocab-size 163840 --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim "
        "64 --v-head-dim 128 --qk-layernorm --rotary-scaling-factor 1 --rotary-base 50000 --mscale 1.0 "
        "--mscale-all-dim 1.0 --attention-softmax-in-fp32 --no-rope-fusion --num-experts 64 --moe-layer-freq "
        "[0]*1+[1]*26 --moe-ffn-hidden-size 1408 --moe-router-topk 6 "
        "--moe-shared-expert-intermediate-size 2816 --moe-router-pre-softmax --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
        "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0 "
        "--moe-router-group-topk 1 --moe-router-num-groups 1 --moe-grouped-gemm --moe-router-topk-scaling-factor "
        "2.446 --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-permute-fusion --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --train-iters 1000 --global-batch-size 256 --bf16 "
        "--use-distributed-optimizer --save ck --save-interval 20 --tensor-model-parallel-size 4 "
        "--sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 "
        "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --optimizer adam --lr 1e-6 --lr-decay-style constant "
        "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --optimizer-cpu-offload "
        "--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer --attention-dropout 0.0 --hidden-dropout "
        "0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --moe-enable-deepep "
        "--moe-token-dispatcher-type flex",
    ),
    # Kimi K2: Megatron-LM's arguments of slime
    "kimi_k2": (
        256,
        "--disable-bias-linear --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads "
        "64 --kv-channels 64 --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-6 --swiglu "
        "--untie-embeddings-and-output-weights --vocab-size 163840 --multi-latent-attention --q-lora-rank 1536 "
        "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm "
        "--rotary-scaling-factor 32.0 --rotary-base 50000 --mscale 1.0 --mscale-all-dim 1.0 "
        "--attention-softmax-in-fp32 --no-rope-fusion --num-experts 384 --moe-layer-freq "
        "[0]*1+[1]*60 "
        "--moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 "
        "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff "
        "0 --moe-router-bias-update-rate 0 --moe-router-group-topk 1 --moe-router-num-groups 1 --moe-grouped-gemm "
        "--moe-router-topk-scaling-factor 2.827 --moe-router-dtype fp32 --moe-permute-fusion --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --train-iters 1000 --global-batch-size 256 --bf16 "
        "--use-distributed-optimizer --save ck --save-interval 20 --tensor-model-parallel-size 8 "
        "--sequence-parallel --pipeline-model-parallel-size 8 --context-parallel-size 4 "
        "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --decoder-last-pipeline-num-layers 5 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer adam --lr "
        "1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 "
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
        "--attention-softmax-in-fp32 --attention-backend flash",
    ),
    # Qwen3 4B: Megatron-LM's arguments of slime
    "qwen3_4b": (
        8,
        "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear "
        "--normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128 "
        "--qk-layernorm --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --train-iters 1000 "
        "--global-batch-size 256 --bf16 --use-distributed-optimizer --save ck --save-interval 20 "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer adam --lr "
        "1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --attention-dropout "
        "0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
        "--attention-backend flash",
    ),
    # Llama 3.1 8B, with the factor of YaRN beside RoPE: Megatron-LM's arguments of slime
    "llama3_1_8b": (
        8,
        "--swiglu --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --max-position-embeddings 131072 "
        "--use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 "
        "--rotary-base 500000 --vocab-size 128256 --kv-channels 128 --use-rope-scaling --rotary-scaling-factor "
        "8.0 --untie-embeddings-and-output-weights --seq-length 4096 --micro-batch-size 1 --train-iters 1000 "
        "--global-batch-size 256 --bf16 --use-distributed-optimizer --save ck --save-interval 20 "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer adam --lr "
        "1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --attention-dropout "
        "0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
        "--attention-backend flash",
    ),
    # Megatron-LM, DeepSeek-V2-Lite of its ModelOpt examples
    "deepseek_v2_lite": (
        8,
        "--save-interval 100000 --attention-dropout 0.0 --hidden-dropout 0.0 --micro-batch-size 1 --bf16 "
        "--no-masked-softmax-fusion --disable-bias-linear --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --no-rope-fusion --normalization RMSNorm --norm-epsilon 1e-6 --swiglu "
        "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --kv-channels 16 "
        "--multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 --qk-head-dim 128 --qk-layernorm "
        "--qk-pos-emb-head-dim 64 --num-experts 64 --moe-layer-freq '([0]+[1]*26)' --moe-ffn-hidden-size 1408 "
        "--moe-grouped-gemm --moe-router-score-function softmax --moe-router-topk 6 "
        "--moe-router-topk-scaling-factor 1.0 --moe-router-pre-softmax --moe-shared-expert-intermediate-size 2816 "
        "--moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs "
        "--moe-router-load-balancing-type seq_aux_loss --seq-length 1024 --max-position-embeddings 1024 "
        "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 3200 --attention-softmax-in-fp32 "
        "--use-mcore-models --rotary-percent 1.0 --rotary-base 10000 --rotary-scaling-factor 40 --mscale 0.707 "
        "--mscale-all-dim 0.707 --sequence-parallel --tensor-model-parallel-size 2 --train-iters 1000 --lr 1e-5",
    ),
    # Megatron-LM, Nemotron-Mini 4B of its ModelOpt examples
    "nemotron_mini_4b": (
        8,
        "--trust-remote-code --save-interval 100000 --micro-batch-size 1 --bf16 --no-masked-softmax-fusion "
        "--disable-bias-linear --untie-embeddings-and-output-weights --use-rotary-position-embeddings "
        "--rotary-percent 0.5 --no-rope-fusion --no-position-embedding --normalization LayerNorm "
        "--apply-layernorm-1p --squared-relu --num-layers 32 --hidden-size 3072 --ffn-hidden-size 9216 "
        "--num-attention-heads 24 --group-query-attention --num-query-groups 8 --seq-length 4096 "
        "--max-position-embeddings 4096 --tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 1 "
        "--use-mcore-models --rotary-base 10000 --tensor-model-parallel-size 2 --train-iters 1000 --lr 1e-5",
    ),
    # Megatron-LM, Qwen2.5 7B, with two flags for the padded vocabulary of its ModelOpt examples
    "qwen2_5_7b": (
        8,
        "--save-interval 100000 --micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear "
        "--add-qkv-bias --position-embedding-type rope --no-rope-fusion --normalization RMSNorm --swiglu "
        "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 "
        "--group-query-attention --num-query-groups 4 --kv-channels 128 --seq-length 4096 "
        "--max-position-embeddings 32768 --tokenizer-type HuggingFaceTokenizer --padded-vocab-size 152064 "
        "--make-vocab-size-divisible-by 1 --use-mcore-models --rotary-percent 1.0 --rotary-base 1000000 "
        "--no-bias-swiglu-fusion --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 "
        "--train-iters 1000 --lr 1e-5",
    ),
    # Moonlight 16B-A3B of Pai-Megatron-Patch
    "moonlight_16b_a3b_pai": (
        32,
        "--save ck --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 "
        "--adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008 --attention-dropout 0.0 --hidden-dropout 0.0 "
        "--lr-decay-iters 23841 --lr-warmup-iters 238 --train-iters 23841 --micro-batch-size 1 "
        "--global-batch-size 1024 --num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size "
        "11264 --seq-length 4096 --max-position-embeddings 8192 --max-padding-length 4096 --log-interval 1 "
        "--log-throughput --eval-interval 10000 --eval-iters 10 --save-interval 500 --tensorboard-queue-size 1 "
        "--tensorboard-dir tb --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 1 "
        "--no-load-optim --no-load-rng --num-workers 8 --extra-vocab-size 0 --patch-tokenizer-type "
        "DeepSeekV2Tokenizer --swiglu --normalization RMSNorm --norm-epsilon 1e-5 "
        "--use-rotary-position-embeddings --no-rope-fusion --rope-type rope --untie-embeddings-and-output-weights "
        "--disable-bias-linear --rotary-base 50000 --rotary-scaling-factor 1 --no-save-optim --kv-channels 128 "
        "--qk-layernorm --multi-latent-attention --ckpt-format torch_dist --transformer-impl transformer_engine "
        "--no-masked-softmax-fusion --use-rope-scaling --attention-backend auto --data-path data --split 99,1,0 "
        "--dataset MMAP --bf16 --load ck --recompute-method uniform --recompute-num-layers 1 "
        "--recompute-granularity full --use-distributed-optimizer --sequence-parallel --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --moe-router-topk 6 --moe-router-group-topk 1 "
        "--moe-router-num-groups 1 --num-experts 64 --expert-model-parallel-size 4 --expert-tensor-parallel-size "
        "1 --moe-ffn-hidden-size 1408 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-router-topk-scaling-factor 2.446 --moe-shared-expert-overlap --moe-router-enable-expert-bias "
        "--mscale 1.0 --mscale-all-dim 1.0 --moe-router-score-function sigmoid --moe-router-bias-update-rate "
        "0.001 --moe-layer-freq '([0]*1+[1]*26)' --moe-shared-expert-intermediate-size 2816 --kv-lora-rank 512 "
        "--qk-nope-head-dim 128 --qk-rope-head-dim 64 --v-head-dim 128 --tp-comm-overlap --overlap-grad-reduce "
        "--overlap-param-gather --train-mode pretrain --decoder-first-pipeline-num-layers 13",
    ),
}
