"""Arguments of published launch scripts, with paths shortened: what users paste.

Name -> ranks, and the arguments after the program of the script that is named above them.
"""

from tests.config.more_launch_scripts import MORE_SCRIPTS

SCRIPTS: dict[str, tuple[int, str]] = {
    # Megatron-LM, GPT-3 175B
    "gpt3_175b": (
        1024,
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 "
        "--global-batch-size 1536 "
        "--step-batch-size-schedule 0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536 --train-iters 500000 "
        "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 "
        "--lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
        "--lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
        "--data-path data --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 --log-interval 100 "
        "--save-interval 10000 --eval-interval 1000 --save ck --load ck --eval-iters 10 --tensorboard-dir tb",
    ),
    # Megatron-LM, Llama 3 8B in fp8
    "llama3_8b_fp8": (
        8,
        "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 "
        "--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope "
        "--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu "
        "--normalization RMSNorm --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
        "--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 "
        "--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 "
        "--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 "
        "--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 "
        "--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
        "--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 "
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
        "--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 "
        "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 "
        "--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile "
        "--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist "
        "--distributed-timeout-minutes 60 --save ck --load ck --tensorboard-dir tb",
    ),
    # Megatron-LM, Llama 3 8B with Megatron-FSDP in fp8
    "llama3_8b_fsdp_fp8": (
        8,
        "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 "
        "--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope "
        "--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu "
        "--normalization RMSNorm --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
        "--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 "
        "--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 "
        "--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 "
        "--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 "
        "--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --cross-entropy-loss-fusion "
        "--no-check-for-nan-in-loss-and-grad --manual-gc --empty-unused-memory-level 1 "
        "--exit-duration-in-mins 235 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--no-gradient-accumulation-fusion --calculate-per-token-loss --init-model-with-meta-device "
        "--ckpt-format fsdp_dtensor --use-nccl-ub --fsdp-double-buffer --fsdp-manual-registration --profile "
        "--profile-step-start 8 --profile-step-end 12 --profile-ranks 0 --record-memory-history "
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
        "--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 "
        "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 "
        "--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput "
        "--logging-level 20 --distributed-timeout-minutes 60 --save ck --load ck --tensorboard-dir tb",
    ),
    # Megatron-LM, DeepSeek-V3 with Megatron-FSDP
    "deepseek_v3_fsdp": (
        64,
        "--distributed-timeout-minutes 60 --tensor-model-parallel-size 1 --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --context-parallel-size 1 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --use-mcore-models --sequence-parallel --use-flash-attn "
        "--disable-bias-linear --micro-batch-size 4 --global-batch-size 2048 --train-samples 585937500 "
        "--exit-duration-in-mins 220 --no-check-for-nan-in-loss-and-grad --manual-gc --manual-gc-interval 10 "
        "--recompute-granularity selective --recompute-modules mlp moe mla_up_proj layernorm "
        "--transformer-impl transformer_engine --seq-length 4096 --data-cache-path out/cache "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3 --data-path data "
        "--split 99,1,0 --no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-workers 6 "
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--kv-channels 128 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000 "
        "--make-vocab-size-divisible-by 3232 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu "
        "--untie-embeddings-and-output-weights --multi-latent-attention --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --qk-layernorm --lr-decay-samples 584765624 "
        "--lr-warmup-samples 1536000 --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 "
        "--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 256 "
        "--moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend hybridep --moe-router-pre-softmax --moe-grouped-gemm "
        "--moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 "
        "--moe-permute-fusion --moe-router-force-load-balancing --q-lora-rank 1536 --kv-lora-rank 512 "
        "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 "
        "--mscale-all-dim 1.0 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --eval-iters 32 "
        "--eval-interval 100 --auto-detect-ckpt-format --load out/checkpoints --save out/checkpoints "
        "--save-interval 100 --dist-ckpt-strictness log_all --init-method-std 0.02 "
        "--log-timers-to-tensorboard --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm "
        "--log-validation-ppl-to-tensorboard --log-throughput --log-interval 1 --logging-level 40 "
        "--tensorboard-dir out/tensorboard --bf16 --enable-experimental --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
        "--use-distributed-optimizer --calculate-per-token-loss --init-model-with-meta-device "
        "--ckpt-format fsdp_dtensor --fsdp-double-buffer --use-nccl-ub --megatron-fsdp-grad-comm-dtype bf16 "
        "--megatron-fsdp-main-grads-dtype bf16 --profile --profile-step-start 10 --profile-step-end 12 "
        "--profile-ranks 0 --wandb-project your_own_wandb_project "
        "--wandb-exp-name DeepSeek-V3-TP1EP8-MBS4GBS2048-",
    ),
    # Megatron-LM, Mixtral 8x7B
    "mixtral_8x7b": (
        32,
        "--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 "
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm "
        "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights "
        "--group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding "
        "--rotary-base 1000000 --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
        "--overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer "
        "--tokenizer-model tokenizer --data-path data --split 99990,8,2 --micro-batch-size 1 "
        "--global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 "
        "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 "
        "--bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
        "--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --log-interval 1 "
        "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ck --load ck "
        "--tensorboard-dir ck/tensorboard --no-load-optim --no-load-rng --wandb-project Mixtral "
        "--wandb-exp-name Mixtral_8x7B",
    ),
    # Megatron-LM, gpt-oss 20B
    "gpt_oss_20b": (
        8,
        "--no-masked-softmax-fusion --transformer-impl transformer_engine --disable-bias-linear "
        "--untie-embeddings-and-output-weights --no-rope-fusion --normalization RMSNorm --num-layers 12 "
        "--hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 64 --group-query-attention "
        "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --use-mcore-models "
        "--rotary-percent 1.0 --rope-type rope --position-embedding-type rope --rotary-base 10000 "
        "--no-bias-gelu-fusion --export-force-local-attention --no-bias-dropout-fusion --quick-geglu "
        "--glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2 "
        "--activation-func-clamp-value 7.0 --window-size 127,0 --enable-gpt-oss --num-experts 4 "
        "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce "
        "--moe-ffn-hidden-size 2048 --moe-router-dtype fp32 --moe-z-loss-coeff 1e-3 --moe-permute-fusion "
        "--micro-batch-size 1 --global-batch-size 128 --lr 1.0e-5 --train-samples 1953125000 "
        "--lr-decay-samples 1949218748 --lr-decay-style cosine --min-lr 1.0e-6 --weight-decay 0.1 "
        "--lr-warmup-fraction 0.05 --clip-grad 1.0 --bf16 --use-flash-attn --attention-softmax-in-fp32 "
        "--accumulate-allreduce-grads-in-fp32 --disable-bf16-reduced-precision-matmul --recompute-activations "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 --expert-model-parallel-size 1 "
        "--sequence-parallel --context-parallel-size 1 --use-distributed-optimizer --fp8-format hybrid "
        "--fp8-param-gather --fp8-amax-compute-algo max --fp8-amax-history-len 1024 --log-interval 1 "
        "--save-interval 10000 --eval-interval 50000000 --eval-iters 0 --save ck "
        "--tensorboard-dir ck/tensorboard --moe-per-layer-logging --no-load-optim --no-load-rng "
        "--log-throughput",
    ),
    # Model Optimizer, Qwen3-30B-A3B
    "qwen3_30b_a3b": (
        8,
        "--save-interval 100000 --micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear "
        "--untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion "
        "--normalization RMSNorm --swiglu --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 "
        "--qk-layernorm --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 "
        "--moe-router-dtype fp32 --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type aux_loss --seq-length 4096 --max-position-embeddings 40960 "
        "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 1187 --use-mcore-models "
        "--rotary-percent 1.0 --rotary-base 1000000 --no-bias-swiglu-fusion --sequence-parallel",
    ),
    # Model Optimizer, Qwen3-235B-A22B
    "qwen3_235b_a22b": (
        8,
        "--save-interval 100000 --micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear "
        "--untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion "
        "--normalization RMSNorm --swiglu --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 "
        "--num-attention-heads 64 --group-query-attention --num-query-groups 4 --kv-channels 128 "
        "--qk-layernorm --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8 "
        "--moe-router-dtype fp32 --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type aux_loss --moe-layer-recompute --seq-length 4096 "
        "--max-position-embeddings 40960 --tokenizer-type HuggingFaceTokenizer "
        "--make-vocab-size-divisible-by 1187 --use-mcore-models --rotary-percent 1.0 --rotary-base 1000000 "
        "--rotary-seq-len-interpolation-factor 1 --no-bias-swiglu-fusion --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --sequence-parallel",
    ),
    # Model Optimizer, Qwen3-8B
    "qwen3_8b": (
        8,
        "--save-interval 100000 --micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear "
        "--untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion "
        "--normalization RMSNorm --swiglu --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 "
        "--qk-layernorm --seq-length 4096 --max-position-embeddings 40960 "
        "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 1187 --use-mcore-models "
        "--rotary-percent 1.0 --rotary-base 1000000 --no-bias-swiglu-fusion",
    ),
    # Model Optimizer, Llama 3.1 8B
    "llama31_8b": (
        8,
        "--save-interval 100000 --micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear "
        "--untie-embeddings-and-output-weights --use-rotary-position-embeddings --rotary-percent 1.0 "
        "--no-rope-fusion --no-position-embedding --normalization RMSNorm --swiglu --num-layers 32 "
        "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 "
        "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 1 --use-mcore-models "
        "--rotary-base 500000 --use-rope-scaling",
    ),
    # Model Optimizer, DeepSeek-R1
    "deepseek_r1": (
        8,
        "--save-interval 100000 --micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear "
        "--untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion "
        "--normalization RMSNorm --swiglu --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
        "--num-attention-heads 128 --kv-channels 128 --multi-latent-attention --kv-lora-rank 512 "
        "--v-head-dim 128 --q-lora-rank 1536 --qk-head-dim 128 --qk-layernorm --qk-pos-emb-head-dim 64 "
        "--num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048 --moe-router-dtype fp32 "
        "--moe-router-score-function sigmoid --moe-router-bias-update-rate 1e-3 "
        "--moe-router-enable-expert-bias --moe-router-topk 8 --moe-router-num-groups 8 "
        "--moe-router-group-topk 4 --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5 "
        "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 2048 --moe-aux-loss-coeff 1e-4 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall "
        "--moe-token-drop-policy probs --seq-length 4096 --max-position-embeddings 163840 "
        "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 1280 --use-mcore-models "
        "--rotary-base 10000 --rotary-percent 1.0 --rotary-scaling-factor 40 --mscale 1.0 "
        "--mscale-all-dim 1.0 --recompute-activations --moe-layer-recompute --sequence-parallel",
    ),
    # Megatron-LM release test, Mixtral 8x7B with virtual stages
    "mixtral_8x7b_interleaved": (
        64,
        "--distributed-timeout-minutes 60 --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --num-layers-per-virtual-pipeline-stage 1 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models "
        "--sequence-parallel --use-flash-attn --disable-bias-linear --micro-batch-size 1 "
        "--global-batch-size 256 --train-samples 51200 --exit-duration-in-mins 230 "
        "--transformer-impl transformer_engine --data-cache-path cache --tokenizer-type Llama2Tokenizer "
        "--tokenizer-model data/tokenizer.model --data-path data --split 99,1,0 --no-mmap-bin-files "
        "--num-workers 6 --untie-embeddings-and-output-weights --position-embedding-type rope "
        "--no-rope-fusion --rotary-percent 1.0 --normalization RMSNorm --swiglu --num-layers 32 "
        "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 "
        "--make-vocab-size-divisible-by 128 --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 "
        "--weight-decay 0.1 --lr-decay-samples 255126953 --lr-warmup-samples 162761 --lr 1.2e-05 "
        "--min-lr 1.2e-06 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 "
        "--expert-model-parallel-size 8 --num-experts 8 --moe-router-load-balancing-type aux_loss "
        "--moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 "
        "--moe-token-dispatcher-type alltoall --eval-iters 32 --eval-interval 200 --finetune "
        "--auto-detect-ckpt-format --load ck --save ck --no-ckpt-fully-parallel-save --save-interval 200 "
        "--init-method-std 0.008 --log-timers-to-tensorboard --log-memory-to-tensorboard "
        "--log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard --log-throughput "
        "--log-interval 1 --tensorboard-dir tb --wandb-project megatron-core-release-runs --wandb-entity adlr "
        "--wandb-exp-name name --wandb-save-dir wandb --bf16 --dist-ckpt-strictness log_all "
        "--exit-interval 200",
    ),
    # Megatron-LM release test, Nemotron-4 15B
    "nemotron_15b": (
        64,
        "--distributed-timeout-minutes 60 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models "
        "--sequence-parallel --disable-bias-linear --micro-batch-size 4 "
        "--step-batch-size-schedule 0:384 200B:768 400B:1152 --train-samples 19531250 --manual-gc "
        "--transformer-impl transformer_engine --data-cache-path cache "
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model data/utils/nemotron_2_256k.model "
        "--data-path data --split 99,1,0 --no-mmap-bin-files --num-workers 6 --apply-layernorm-1p "
        "--untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion "
        "--rotary-percent 0.5 --squared-relu --num-layers 32 --hidden-size 6144 --num-attention-heads 48 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 "
        "--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00045 --min-lr 4.5e-05 "
        "--decoupled-lr 0.0005 --decoupled-min-lr 4.5e-05 --lr-decay-style cosine --adam-beta1 0.9 "
        "--adam-beta2 0.95 --eval-iters 32 --eval-interval 2000 --save ck --load ck --save-interval 1000 "
        "--save-retain-interval 5000 --init-method-std 0.0134 --log-timers-to-tensorboard "
        "--log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm "
        "--log-validation-ppl-to-tensorboard --log-throughput --log-interval 100 --tensorboard-dir tb "
        "--wandb-project megatron-core-release-runs --wandb-entity adlr --wandb-exp-name name --bf16 "
        "--exit-interval 51000 --wandb-save-dir wandb --async-save --use-persistent-ckpt-worker",
    ),
    # Megatron-LM functional test, GPT-3 with full recomputation
    "gpt3_full_recompute": (
        8,
        "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --log-params-norm --log-num-zeros-in-grad "
        "--log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --tensorboard-dir tb "
        "--micro-batch-size 4 --global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 "
        "--train-iters 50 --timing-log-level 0 --lr-decay-iters 320000 --save ck --load ck "
        "--data-path data/text/common_pile/v01_filtered_data/my-gpt3_00_text_document "
        "--vocab-file data/text/common_pile/v01_filtered_data/bpe/vocab.json "
        "--merge-file data/text/common_pile/v01_filtered_data/bpe/merges.txt --split 949,50,1 "
        "--distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1e-05 --weight-decay 1e-2 "
        "--clip-grad 1.0 --lr-warmup-fraction 0.01 --log-interval 1 --save-interval 10000 "
        "--eval-interval 1000 --eval-iters 10 --transformer-impl transformer_engine "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --deterministic-mode "
        "--no-gradient-accumulation-fusion --attention-softmax-in-fp32 --use-mcore-models "
        "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness log_all "
        "--data-cache-path cache --bf16 --attention-backend unfused --log-memory-to-tensorboard --async-save "
        "--use-persistent-ckpt-worker",
    ),
    # Megatron-LM functional test, GPT-3 with ZeRO-3
    "gpt3_zero3": (
        8,
        "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --log-params-norm --log-num-zeros-in-grad "
        "--log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --log-memory-to-tensorboard "
        "--tensorboard-dir tb --micro-batch-size 4 --global-batch-size 32 --seq-length 1024 "
        "--max-position-embeddings 1024 --train-iters 100 --timing-log-level 0 --lr-decay-iters 320000 "
        "--save ck --load ck --data-path data/text/common_pile/v01_filtered_data/my-gpt3_00_text_document "
        "--vocab-file data/text/common_pile/v01_filtered_data/bpe/vocab.json "
        "--merge-file data/text/common_pile/v01_filtered_data/bpe/merges.txt --split 949,50,1 "
        "--distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1e-05 --weight-decay 1e-2 "
        "--clip-grad 1.0 --lr-warmup-fraction 0.01 --log-interval 1 --save-interval 50 --eval-interval 1000 "
        "--eval-iters 10 --transformer-impl transformer_engine --tensor-model-parallel-size 2 "
        "--use-megatron-fsdp --calculate-per-token-loss --data-parallel-sharding-strategy optim_grads_params "
        "--use-distributed-optimizer --deterministic-mode --no-gradient-accumulation-fusion "
        "--megatron-fsdp-main-params-dtype fp32 --megatron-fsdp-main-grads-dtype fp32 "
        "--megatron-fsdp-grad-comm-dtype fp32 --attention-softmax-in-fp32 "
        "--use-checkpoint-opt_param-scheduler --use-mcore-models --ckpt-format fsdp_dtensor "
        "--data-cache-path cache --bf16 --async-save --use-persistent-ckpt-worker",
    ),
    # ROCm Megatron-LM, Llama 2 7B with recomputation in fp8
    "llama2_7b": (
        4,
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 "
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
        "--seq-length 4096 --max-position-embeddings 32000 --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --no-position-embedding --swiglu --disable-bias-linear "
        "--init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm "
        "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 "
        "--no-async-tensor-model-parallel-allreduce --bf16 --no-masked-softmax-fusion "
        "--recompute-num-layers 32 --recompute-granularity full --recompute-method block "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --split 99990,8,2 "
        "--dataloader-type cyclic --save-interval 200000 --tensorboard-dir tb --log-interval 1 "
        "--eval-interval 320000 --eval-iters 10 --num-workers 8 --mock-data --data-cache-path cache "
        "--log-interval 1 --save-interval 5000 --log-throughput --no-save-optim --eval-iters -1 "
        "--group-query-attention --num-query-groups 32 --no-gradient-accumulation-fusion "
        "--distributed-backend nccl --distributed-timeout-minutes 120 --overlap-grad-reduce "
        "--use-distributed-optimizer --overlap-param-gather --use-flash-attn --sequence-parallel "
        "--use-mcore-models --transformer-impl=transformer_engine --fp8-margin=0 --fp8-format=hybrid "
        "--fp8-interval=1 --fp8-amax-history-len=1024 --fp8-amax-compute-algo=max --attention-softmax-in-fp32 "
        "--lr 1e-4 --min-lr 1e-5 --lr-decay-iters 320000 --lr-decay-style cosine --weight-decay 1.0e-1 "
        "--clip-grad 1.0 --ckpt-format torch_dist --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95",
    ),
    # ROCm Megatron-LM, Llama 2 70B with recomputation
    "llama2_70b": (
        8,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --context-parallel-size 1 "
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--seq-length 4096 --max-position-embeddings 32000 --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --no-position-embedding --swiglu --disable-bias-linear "
        "--init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm "
        "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 "
        "--no-async-tensor-model-parallel-allreduce --bf16 --no-masked-softmax-fusion "
        "--recompute-num-layers 80 --recompute-granularity full --recompute-method block "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --split 99990,8,2 "
        "--dataloader-type cyclic --save-interval 200000 --tensorboard-dir tb --log-interval 1 "
        "--eval-interval 320000 --eval-iters 10 --num-workers 8 --mock-data --data-cache-path cache "
        "--log-interval 1 --save-interval 5000 --log-throughput --no-save-optim --eval-iters -1 "
        "--group-query-attention --num-query-groups 8 --no-gradient-accumulation-fusion "
        "--distributed-backend nccl --distributed-timeout-minutes 120 --overlap-grad-reduce "
        "--use-distributed-optimizer --overlap-param-gather --use-flash-attn --sequence-parallel "
        "--use-mcore-models --lr 1e-4 --min-lr 1e-5 --lr-decay-iters 320000 --lr-decay-style cosine "
        "--weight-decay 1.0e-1 --clip-grad 1.0 --ckpt-format torch_dist --optimizer adam --adam-beta1 0.9 "
        "--adam-beta2 0.95",
    ),
    # Megatron-MoE-ModelZoo, Qwen3-235B-A22B in mxfp8 with 131,072 tokens
    "qwen3_235b_mxfp8": (
        128,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models "
        "--sequence-parallel --use-flash-attn --disable-bias-linear --transformer-impl transformer_engine "
        "--data-cache-path c --tokenizer-type HuggingFaceTokenizer --data-path data --split 99,1,0 "
        "--no-mmap-bin-files --num-workers 6 --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 "
        "--weight-decay 0.1 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 "
        "0.95 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-router-dtype fp32 --eval-iters 32 "
        "--eval-interval 200 --auto-detect-ckpt-format --no-load-rng --load out/checkpoints --save "
        "out/checkpoints --save-interval 500 --dist-ckpt-strictness log_all --init-method-std 0.02 --bf16 "
        "--expert-tensor-parallel-size 1 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --manual-gc --manual-gc-interval 5 --cross-entropy-loss-fusion "
        "--enable-experimental --no-create-attention-mask-in-dataloader --distributed-timeout-minutes 60 "
        "--log-timers-to-tensorboard --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm "
        "--log-validation-ppl-to-tensorboard --log-throughput --log-interval 1 --logging-level 40 "
        "--tensorboard-dir out/tb --wandb-project p --wandb-exp-name n --fp8-recipe mxfp8 --fp8-format e4m3 "
        "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --use-precision-aware-optimizer "
        "--main-grads-dtype fp32 --main-params-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
        "--moe-router-padding-for-quantization --tokenizer-model Qwen/Qwen3-235B-A22B "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage "
        "2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--expert-model-parallel-size 32 --context-parallel-size 4 --micro-batch-size 1 --global-batch-size 1024 "
        "--train-samples 268554688 --rotary-percent 1.0 --rotary-base 1000000 --norm-epsilon 1e-06 --num-layers "
        "94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --kv-channels 128 "
        "--group-query-attention --num-query-groups 4 --qk-layernorm --seq-length 131072 "
        "--max-position-embeddings 131072 --make-vocab-size-divisible-by 1187 --lr-decay-samples 584765624 "
        "--lr-warmup-samples 1536000 --lr-warmup-init 3.9e-7 --num-experts 128 --moe-ffn-hidden-size 1536 "
        "--moe-router-load-balancing-type aux_loss --moe-router-topk 8 --moe-aux-loss-coeff 1e-3 --finetune "
        "--recompute-granularity selective --recompute-modules moe_act layernorm "
        "--moe-router-force-load-balancing",
    ),
} | MORE_SCRIPTS
