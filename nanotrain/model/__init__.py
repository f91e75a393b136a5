"""GPT models: transformer stages with dense or mixture-of-experts layers.

    transformer.py          block and stage, top to bottom; ends.py has embedding and head
    attention.py, mla.py                               attention and latent attention
    dsa.py, block_sparse.py                            attention to selected keys, and blocks
    compressed.py, compressor.py           attention to a window and to compressed keys
    sublayers.py            attention and MLP of a block by kind: each layer in place of
                            attention, such as mamba.py and delta_net.py, is one row
    recurrence.py           convolutions and states of these, over cp and in generation
    mlp.py, moe.py, router.py, router_stats.py         MLP, mixture of experts
    hash_router.py, router_sinkhorn.py     experts that the token id or a plan chooses
    mtp.py                  multi-token prediction
    norm.py, rope.py, activations.py                   their parts
    norm_casts.py, down_projection.py                  norms and SwiGLU that fp8 casts compute
    context.py              inputs of the layers besides hidden states
    parameters.py           create and initialize the declared parameters

Declarations of parameters are in `spec/`, sharded layers and collectives in `parallel/`.
"""
