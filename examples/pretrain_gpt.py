"""A launch script of Megatron-LM runs as it stands: its flags, and its defaults where they leave a
setting out.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --num-layers 2 --hidden-size 64
        --num-attention-heads 4 \\ --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2
        --lr 1e-3 --train-iters 10 --mock-data \\ --vocab-size 512 --use-mcore-models --save
        checkpoints --load checkpoints

docs/from_megatron.md lists what becomes of each flag; `nanotrain config FLAGS` prints the resolved
configuration.
"""

import sys

from nanotrain.system import run_program
from nanotrain.train.main import main

if __name__ == "__main__":
    run_program(lambda: main(["--megatron-defaults", *sys.argv[1:]]))
