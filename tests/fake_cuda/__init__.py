"""CUDA and NCCL without a GPU: libraries in place of NVIDIA's, and torch's CUDA kernels computed on
the CPU.

    runtime.cpp   CUDA's runtime and driver, and cuBLAS: device memory is host memory, kernels do nothing
    nccl.cpp      NCCL between the processes of a machine, over shared memory
    build         compile both, with stubs for every other function that torch's CUDA libraries import
    kernels       values: torch's CUDA operators by its CPU ones, over the same memory
    attention     the operators of attention that CPUs lack, written out
    startup/      makes a Python process install them

`scripts/without_gpu` runs a command with them; docs/gpu.md tells what that shows and what it
cannot.
"""
