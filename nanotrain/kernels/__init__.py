"""The matrix products of linear layers, dense and grouped, and the kernels around them.

    linear.py, grouped.py   {fprop, dgrad, wgrad} of a dense layer and of stacked experts
    deferred_wgrad.py       the queue of weight gradients of zero-bubble schedules
    rms_norm.py             RMSNorm by factors per row, for casts that compute it
    permute.py              tokens in the order of their experts, and back
    dropout.py              dropout as a hash of indices
    fp8/                    the products in fp8
    triton_*.py             Triton kernels of permutation, softmax, SwiGLU and scans
    compiler.py             whether Triton and inductor work on this machine

No communication and no modules: the layers that call these products are in `parallel/`.
"""
