"""The section of data types, with fp8 and NVFP4."""

from dataclasses import dataclass
from typing import Literal

from nanotrain.config.option import above, at_least, option, section

DType = Literal["fp32", "bf16", "fp16"]
MainGradsDType = Literal["fp32", "bf16"]
Fp8Format = Literal["e4m3", "hybrid", "e2m1"]
AmaxAlgo = Literal["most_recent", "max"]


@dataclass(frozen=True)
class Fp8Config:
    """Matrix products in fp8 or NVFP4; used when fp8_format is set."""

    format: Fp8Format = option(None)
    """matrix products of linear layers in fp8: e4m3, or hybrid (gradients in e5m2); in 4 bits:
    e2m1; unset: in params_dtype
    """

    recipe: str = option("delayed")
    """name of the scaling recipe, such as delayed or tensorwise; nvfp4 for e2m1"""

    margin: int = option(0, check=at_least(0))
    """delayed: scales are lower than the amax allows by 2^margin"""

    amax_history_len: int = option(1, check=at_least(1))
    """delayed: steps of the amax history"""

    amax_compute_algo: AmaxAlgo = option("most_recent")
    """delayed: amax of the history: most_recent or max"""

    wgrad: bool = option(True)
    """weight gradients in fp8; off: in params_dtype"""

    param_gather: bool = option(False)
    """keep the weights of fp8 products in fp8 and all-gather them so; the same values"""

    first_last_layers_bf16: bool = option(False, name="first_last_layers_bf16")
    """no fp8 in the first and last layers"""

    num_layers_at_start_in_bf16: int = option(
        1, name="num_layers_at_start_in_bf16", check=at_least(0)
    )
    """layers at the start without fp8"""

    num_layers_at_end_in_bf16: int = option(1, name="num_layers_at_end_in_bf16", check=at_least(0))
    """layers at the end without fp8"""


@dataclass(frozen=True)
class PrecisionConfig:
    """Data types of parameters, gradients and optimizer state."""

    params_dtype: DType = option("fp32")
    """data type of parameters and activations: fp32, bf16 or fp16"""

    disable_bf16_reduced_precision_matmul: bool = option(False)
    """add the parts of a split bf16 product in fp32 on GPUs, where torch's default adds them in
    bf16
    """

    accumulate_allreduce_grads_in_fp32: bool | None = option(None)
    """accumulate and reduce gradients in fp32, or in params_dtype; unset: fp32, but with
    grad_reduce_in_bf16 or main_grads_dtype bf16
    """

    grad_reduce_in_bf16: bool = option(False)
    """accumulate and reduce gradients of bf16 parameters in bf16"""

    main_grads_dtype: MainGradsDType = option("fp32")
    """data type of the reduced gradients that the optimizer reads: fp32, or bf16 with bf16
    reduction
    """

    use_precision_aware_optimizer: bool = option(False)
    """allow main parameters and optimizer state in other data types than fp32"""

    main_params_dtype: DType = option("fp32")
    """precision-aware optimizer: data type of the main parameters, which the optimizer updates"""

    exp_avg_dtype: DType = option("fp32")
    """precision-aware optimizer: data type of first moments and momentum buffers"""

    exp_avg_sq_dtype: DType = option("fp32")
    """precision-aware optimizer: data type of second moments"""

    invariant: bool = option(False)
    """losses, gradient norms, weights and optimizer state that equal those of one rank in every
    bit, in every layout: sums in a fixed order, or exact (docs/parity.md)
    """

    loss_scale: float = option(0.0, check=at_least(0))
    """fp16: constant loss scale; 0: it adapts, from initial_loss_scale"""

    initial_loss_scale: float = option(4294967296.0, check=above(0))
    """fp16: initial loss scale"""

    min_loss_scale: float = option(1.0, check=above(0))
    """fp16: minimum loss scale"""

    loss_scale_window: int = option(1000, check=at_least(1))
    """fp16: steps without overflow before the loss scale doubles"""

    hysteresis: int = option(2, check=at_least(1))
    """fp16: overflows before the loss scale halves"""

    fp8: Fp8Config | None = section(Fp8Config, prefix="fp8_", switch="format")

    @property
    def products_dtype(self) -> str:
        """Dtype of the products of linear layers: fp8, nvfp4 or as the parameters.

        >>> PrecisionConfig().products_dtype, PrecisionConfig(fp8=Fp8Config("e4m3")).products_dtype
        ('fp32', 'fp8')
        """
        if self.fp8 is None:
            return self.params_dtype
        return "nvfp4" if self.fp8.recipe == "nvfp4" else "fp8"

    @property
    def accumulates_grads_in_fp32(self) -> bool:
        """Whether gradient buffers are fp32: unless a setting asks for gradients in params_dtype.

        >>> PrecisionConfig(grad_reduce_in_bf16=True).accumulates_grads_in_fp32
        False
        """
        if self.accumulate_allreduce_grads_in_fp32 is not None:
            return self.accumulate_allreduce_grads_in_fp32
        return not self.grad_reduce_in_bf16 and self.main_grads_dtype == "fp32"
