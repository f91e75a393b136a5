"""Which kernels compute a scan: the rows of a table, the first of which can is taken.

    ScanKernel           a row
    SCAN_KERNELS         the table
    chosen_kernel        the row for a rule and a device
    kernel_for           the same for a tensor, remembered per rule, device and dtype
    installed_packages   packages with kernels on this machine
    missing_packages     packages that a model's scans lack on a GPU

Modules are built without a device and may be moved, so a row is looked up when a scan is called: a
dictionary per rule, type of device and dtype.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from nanotrain.comm.device import compute_capability
from nanotrain.kernels.compiler import runs_triton

MAMBA2 = "mamba2"
DELTA_RULES = ("gated_delta_net", "kda")
CONVOLUTION = "convolution"
# scans of mixers (spec/kinds)
RULES = {
    "mamba2": MAMBA2,
    "attention_mamba2": MAMBA2,
    "gated_delta_net": "gated_delta_net",
    "kda": "kda",
}
TITLES = {MAMBA2: "Mamba-2", "gated_delta_net": "Gated DeltaNet", "kda": "KDA"}
# shared memory per block of the walk: 164 kB for decays per channel, of 227 kB on these cards
TRITON_CAPABILITIES = (9, 10)


@dataclass(frozen=True)
class ScanKernel:
    """Kernels of one or several rules, for 16-bit tensors on a GPU; torch's row takes the rest."""

    name: str
    rules: tuple[str, ...]
    package: str | None = None  # name under which it is imported; None: nothing to install
    distribution: str = ""  # name under which it is installed
    needs_rate: bool = False  # reads the rate A of Mamba-2, which context parallelism leaves out

    @property
    def advice(self) -> str:
        """The line that recommends the package of this row to a run on a GPU."""
        titles = [TITLES[rule] for rule in self.rules if rule in TITLES]
        rules = " and ".join(titles)
        return (
            f"{rules}: this project's Triton kernels run, on GPUs other than Hopper and Blackwell "
            f"torch's operators; pip install {self.distribution} for those of {self.name}"
        )


SCAN_KERNELS = (
    ScanKernel(
        "mamba_ssm",
        (MAMBA2,),
        package="mamba_ssm",
        distribution="mamba-ssm --no-build-isolation",
        needs_rate=True,
    ),
    ScanKernel("fla", (*DELTA_RULES, MAMBA2), package="fla", distribution="flash-linear-attention"),
    ScanKernel(
        "causal_conv1d",
        (CONVOLUTION,),
        package="causal_conv1d",
        distribution="causal-conv1d --no-build-isolation",
    ),
    ScanKernel("triton", (*DELTA_RULES, MAMBA2)),
    ScanKernel("torch", (*DELTA_RULES, MAMBA2, CONVOLUTION)),
)


def chosen_kernel(
    rule: str,
    *,
    installed: frozenset[str],
    is_low: bool = True,
    has_triton: bool = True,
    has_rate: bool = True,
) -> str:
    """The name of the row that computes a rule.

    >>> chosen_kernel("mamba2", installed=frozenset({"fla", "mamba_ssm"}))
    'mamba_ssm'
    >>> chosen_kernel("kda", installed=frozenset())
    'triton'

    Args:
        rule: "mamba2", "gated_delta_net", "kda" or "convolution".
        installed: packages that are there.
        is_low: whether tensors have 16 bits and are on a GPU.
        has_triton: whether the kernels of this project run there.
        has_rate: whether the inputs have the rate A.
    """
    for kernel in SCAN_KERNELS:
        if rule not in kernel.rules:
            continue
        is_package = kernel.package is not None
        lacks_package = is_package and kernel.package not in installed
        lacks_rate = kernel.needs_rate and not has_rate
        lacks_triton = kernel.name == "triton" and not has_triton
        lacks_bits = kernel.name != "torch" and not is_low
        if not (lacks_package or lacks_rate or lacks_triton or lacks_bits):
            return kernel.name
    raise AssertionError(f"torch computes {rule}")


def kernel_for(rule: str, x: Tensor, *, has_rate: bool = False) -> str:
    """The name of the row that computes a rule on a tensor."""
    if not x.is_cuda:
        return "torch"
    return _kernel_on_gpu(
        rule, is_low=x.itemsize == 2, has_triton=_runs_our_kernels(x), has_rate=has_rate
    )


@cache
def _kernel_on_gpu(rule: str, *, is_low: bool, has_triton: bool, has_rate: bool) -> str:
    return chosen_kernel(
        rule,
        installed=installed_packages(),
        is_low=is_low,
        has_triton=has_triton,
        has_rate=has_rate,
    )


def _runs_our_kernels(x: Tensor) -> bool:
    """Whether triton_chunk_scan.py runs on the device of a tensor."""
    return runs_chunk_scan(compute_capability(x.device)) and runs_triton(x)


def runs_chunk_scan(capability: tuple[int, int] | None) -> bool:
    """Whether a GPU of a compute capability has the memory for triton_chunk_scan.py; None: no GPU
    of NVIDIA.
    """
    return capability is not None and capability[0] in TRITON_CAPABILITIES


@cache
def installed_packages() -> frozenset[str]:
    """Packages of the table that this machine has."""
    packages = {kernel.package for kernel in SCAN_KERNELS if kernel.package}
    return frozenset(package for package in packages if find_spec(package) is not None)


def missing_packages(mixers: Iterable[str], *, installed: frozenset[str]) -> tuple[ScanKernel, ...]:
    """The package to recommend for each scan of some mixers that has no package installed."""
    rules = {RULES[mixer] for mixer in mixers if mixer in RULES}
    missing: dict[str, ScanKernel] = {}
    for rule in sorted(rules):
        rows = [kernel for kernel in SCAN_KERNELS if rule in kernel.rules and kernel.package]
        if not any(kernel.package in installed for kernel in rows):
            missing[rows[0].name] = rows[0]
    return tuple(missing.values())
