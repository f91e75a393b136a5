#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-8}
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --softmax-type learnable --attention-dropout 0.0 --hidden-dropout 0.0
    --seq-length 8192 --max-position-embeddings 8192
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128 --train-iters 100000 --lr-warmup-samples 2000
    --lr 3e-4 --min-lr 3e-5 --bf16 --eod-mask-loss
)
LAYOUT_ARGS=(
    --tensor-model-parallel-size $TP --context-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-param-gather --distribute-saved-activations
)
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${LAYOUT_ARGS[@]} --data-path $DATA --save $OUT \
    --save-interval 1000 --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B
