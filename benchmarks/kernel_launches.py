"""The launches of every Triton kernel: rows of arguments as the functions of the product pass them.

    LAUNCHES       rows; a kernel without one fails tests/kernels/test_triton_compile.py
    find_kernels   the kernels of the package: functions with @triton.jit that no other one calls

A row runs on small CPU tensors. Triton compiles for the types of arguments and for sizes and
addresses that are multiples of 16, so a small case is compiled like a large one.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import nanotrain
from nanotrain.kernels import (
    triton_chunk_scan,
    triton_chunk_scan_backward,
    triton_grouped_wgrad,
    triton_permute,
    triton_softmax,
    triton_swiglu,
)
from nanotrain.kernels.fp8 import (
    triton_cast,
    triton_grouped,
    triton_nvfp4,
    triton_nvfp4_experts,
)
from nanotrain.kernels.fp8.quantize import Cast, ComputedInput, NormInput, SwigluInput
from nanotrain.kernels.fp8.rounding import ElementWords
from nanotrain.kernels.permute import plan_permutation
from nanotrain.kernels.triton_scan_inputs import Inputs
from nanotrain.precision.fp8 import FP8_RECIPES, PER_ROW, PER_TENSOR, RECIPES, Block, Recipe

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
EXPERTS = 4
TOKENS = 512
WIDTH = 256
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AMPERE = 80  # compute capability 8.0
HOPPER = 90
LAST = 129  # no later one is known


@dataclass(frozen=True)
class Launch:
    """A call that launches kernels."""

    name: str
    kernels: frozenset[str]  # names of the kernels that it launches
    run: Callable[[], object]
    first: int = AMPERE  # first compute capability that runs it, ten times
    last: int = LAST  # last one
    is_typical: bool = False  # whether the test suite compiles it, which has no time for all

    @property
    def typical_on(self) -> int | None:
        """The compute capability for which the test suite compiles it: Hopper, or the first one."""
        return max(HOPPER, self.first) if self.is_typical else None

    def runs_on(self, capability: int) -> bool:
        """Whether a card of this compute capability runs the row."""
        return self.first <= capability <= self.last


def _softmax(dtype: torch.dtype) -> None:
    logits = torch.zeros(16, 4096, dtype=dtype)
    ones = torch.ones(16, 1)
    column = torch.zeros(16, 1, dtype=torch.int64)
    logsumexp = triton_softmax.row_logsumexp(logits)
    triton_softmax.softmax_gradient_(
        logits, logsumexp=logsumexp, column=column, local_mask=ones, scale=ones
    )


def _swiglu(dtype: torch.dtype) -> None:
    gate = torch.zeros(16, WIDTH, dtype=dtype)
    out = triton_swiglu.swiglu(gate, gate)
    triton_swiglu.swiglu_backward(out, gate=gate, up=gate)


def _permute(dtype: torch.dtype) -> None:
    plan = plan_permutation(torch.tensor([[0, 1], [1, 2]]), 3)
    rows = torch.zeros(4, WIDTH, dtype=dtype)
    weights = torch.ones(2, 2)
    triton_permute.spread(rows[:2], plan.order, inverse=plan.inverse)
    triton_permute.combine(rows, plan.inverse, weights=None)
    triton_permute.combine(rows, plan.inverse, weights=weights)
    triton_permute.combine_backward(
        rows[:2], rows, order=plan.order, inverse=plan.inverse, weights=weights
    )


def _grouped_wgrad(dtype: torch.dtype, *, adds: bool) -> None:
    """The weight gradients of experts, written or added in fp32."""
    grad = torch.zeros(TOKENS, WIDTH, dtype=dtype)
    out = torch.zeros(EXPERTS, WIDTH, WIDTH)
    triton_grouped_wgrad.write_grouped_wgrad([grad, grad, _offs()], out, adds=adds)


def _offs() -> Tensor:
    """The ends of the tokens of each expert."""
    rows = TOKENS // EXPERTS
    return torch.arange(rows, TOKENS + 1, rows, dtype=torch.int32)


def _cast(
    how: Cast, *, dtype: torch.dtype, has_experts: bool, is_stack: bool, measures: bool
) -> None:
    """Cast an operand whose scales are given where the recipe has one per tensor."""
    x = torch.zeros(TOKENS, WIDTH, dtype=dtype)
    offs = _offs() if has_experts else None
    inverse = None
    if how.block == PER_TENSOR:
        inverse = torch.ones(EXPERTS if has_experts else 1)
    triton_cast.cast(x, how, inverse=inverse, offs=offs, is_stack=is_stack, measures=measures)


def _cast_computed(how: Cast, *, is_norm: bool) -> None:
    """Cast the input of a projection in both forms, computed from what a norm or SwiGLU reads."""
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    operand: ComputedInput = SwigluInput(x, x)
    if is_norm:
        operand = NormInput(x, torch.ones(TOKENS, 1), torch.ones(WIDTH, dtype=x.dtype))
    inverse = None
    if how.block == PER_TENSOR:
        inverse = torch.ones(1)
        triton_cast.amaxes(operand)
    triton_cast.cast(operand, how, inverse=inverse)


def _amaxes(dtype: torch.dtype, *, has_experts: bool, is_known: bool) -> None:
    """The amaxes of experts, or of one matrix."""
    offs = _offs() if has_experts else None
    unless = torch.zeros(EXPERTS if has_experts else 1) if is_known else None
    triton_cast.amaxes(torch.zeros(TOKENS, WIDTH, dtype=dtype), offs, unless=unless)


def _multiply(
    block: Block,
    block_b: Block,
    *,
    dtypes: tuple[torch.dtype, torch.dtype],
    sums: bool,
    is_fast: bool,
) -> None:
    """A product of experts: of their tokens, or summed over their tokens and added in fp32."""
    rows, length = (WIDTH, TOKENS) if sums else (TOKENS, WIDTH)
    b_rows = WIDTH if sums else EXPERTS * WIDTH
    operands = []
    for num_rows, operand_block, dtype in ((rows, block, dtypes[0]), (b_rows, block_b, dtypes[1])):
        values = torch.zeros(num_rows, length).to(dtype)
        operands += [values, _scales(values, operand_block, sums=sums)]
    if sums:
        out = torch.empty(EXPERTS, WIDTH, WIDTH)
    else:
        out = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
    blocks = [size or 0 for size in (*block, *block_b)]
    triton_grouped.write_grouped_mm(
        [*operands, _offs()], blocks, out=out, adds=sums, is_fast=is_fast
    )


def _scales(values: Tensor, block: Block, *, sums: bool) -> Tensor:
    """Scales as the casts of experts return them."""
    rows, columns = values.shape
    if block == PER_TENSOR:
        return torch.ones(EXPERTS, 1)
    if block[1] is None:
        return torch.ones(EXPERTS * rows if sums else rows, 1)
    shape = (-(-rows // (block[0] or 1)), -(-columns // block[1]))
    if block[1] < 128:
        return torch.ones(shape, dtype=torch.uint8)
    if block[0] == 1:
        return torch.ones(shape[::-1]).t()
    return torch.ones(shape)


def _capabilities(recipe: Recipe) -> tuple[int, int]:
    """The first and the last compute capability of a recipe, ten times."""
    first = 10 * recipe.capability[0] + recipe.capability[1]
    if recipe.last_capability is None:
        return first, LAST
    return first, 10 * recipe.last_capability[0] + recipe.last_capability[1]


def _build_casts() -> list[Launch]:
    """Casts of operands of every recipe, dense and of experts, of one form or both."""
    launches = []
    for name, recipe in FP8_RECIPES.items():
        if name == "tensorwise":  # the casts of `delayed` without an amax
            continue
        for has_experts in (False, True):
            for operand in ("input", "grad_t", "grad", "weight"):
                for dtype_name in ("bf16", "fp32"):  # code for fp16 is that for bf16
                    label = f"cast {name} {operand} {'experts ' * has_experts}{dtype_name}"
                    launches.append(_build_cast(label, recipe))
    return launches


def _build_cast(label: str, recipe: Recipe) -> Launch:
    """A cast, from its name: `cast RECIPE OPERAND [experts] DTYPE`."""
    _, name, operand, *rest = label.split()
    is_weight = operand == "weight"
    is_grad = operand.startswith("grad")
    how = Cast(
        recipe.weight_block if is_weight else recipe.block,
        E5M2 if is_grad and "hybrid" in recipe.formats else E4M3,
        power_of_two=recipe.power_of_two,
        rows=operand != "grad_t",
        columns=operand != "input",
    )
    has_experts = "experts" in rest
    run = partial(
        _cast,
        how,
        dtype=FLOATS[rest[-1]],
        has_experts=has_experts,
        is_stack=has_experts and is_weight,
        measures=recipe.has_history,
    )
    kernels = {"_cast"}
    if how.block == PER_ROW:
        kernels.add("_amax")
    first, last = _capabilities(recipe)
    is_typical = label == "cast blockwise grad experts bf16"
    return Launch(label, frozenset(kernels), run, first, last, is_typical)


def _build_computed_casts() -> list[Launch]:
    """Casts that compute SwiGLU or an RMSNorm, of both forms."""
    launches = []
    for name, recipe in FP8_RECIPES.items():
        how = Cast(recipe.block, E4M3, power_of_two=recipe.power_of_two, columns=True)
        first, last = _capabilities(recipe)
        norm = partial(_cast_computed, how, is_norm=True)
        kernels = frozenset({"_cast"})
        is_typical = name == "rowwise"
        launches.append(Launch(f"cast {name} norm bf16", kernels, norm, first, last, is_typical))
        if name in ("tensorwise", "rowwise"):  # their amaxes would take a second read of two
            continue
        swiglu = partial(_cast_computed, how, is_norm=False)
        label = f"cast {name} swiglu bf16"
        is_typical = name == "mxfp8"
        launches.append(Launch(label, kernels, swiglu, first, last, is_typical))
    return launches


def _build_products() -> list[Launch]:
    """Products of experts of every recipe."""
    launches = []
    for name, recipe in FP8_RECIPES.items():
        if name == "delayed":  # the products of `tensorwise`
            continue
        first, last = _capabilities(recipe)
        grad = E5M2 if "hybrid" in recipe.formats else E4M3
        for product in ("fprop", "dgrad", "wgrad"):
            sums = product == "wgrad"
            run = partial(
                _multiply,
                recipe.block,
                recipe.block if sums else recipe.weight_block,
                dtypes=(E4M3 if product == "fprop" else grad, E4M3),
                sums=sums,
                is_fast=product == "fprop",
            )
            kernels = frozenset({"_multiply"})
            label = f"{product} {name} experts"
            is_typical = product == "wgrad" and name in ("rowwise", "blockwise")
            is_typical |= label == "fprop tensorwise experts"
            launches.append(Launch(label, kernels, run, first, last, is_typical))
    return launches


def _build_amaxes() -> list[Launch]:
    """Amaxes of a matrix or of experts, of all of them or of those without an earlier one."""
    launches = []
    for has_experts in (False, True):
        for is_known in (False, True):
            for name, dtype in FLOATS.items():
                run = partial(_amaxes, dtype, has_experts=has_experts, is_known=is_known)
                label = f"amax {'experts ' * has_experts}{'earlier ' * is_known}{name}"
                is_typical = has_experts and is_known and name == "bf16"
                launches.append(
                    Launch(label, frozenset({"_amax"}), run, first=89, is_typical=is_typical)
                )
    return launches


def _build_rest() -> list[Launch]:
    """Kernels of the loss, of SwiGLU and of permutations."""
    launches = []
    kernels = {
        _softmax: {"_logsumexp", "_softmax_gradient"},
        _swiglu: {"_swiglu", "_swiglu_backward"},
        _permute: {"_spread", "_combine", "_combine_backward"},
    }
    for function, names in kernels.items():
        for name, dtype in FLOATS.items():
            launches.append(
                Launch(
                    f"{function.__name__[1:]} {name}",
                    frozenset(names),
                    partial(function, dtype),
                    is_typical=name == "bf16",
                )
            )
    return launches


def _nvfp4(operand: str, dtype: torch.dtype) -> None:
    """Amaxes of an operand in NVFP4, or the cast of one form."""
    x = torch.zeros(TOKENS, WIDTH, dtype=dtype)
    amax = torch.ones(())
    words = ElementWords(torch.zeros(TOKENS, dtype=torch.int64), first_channel=WIDTH)
    block, weight_block = RECIPES["nvfp4"].block, RECIPES["nvfp4"].weight_block
    if operand == "amaxes":
        triton_nvfp4.tensor_amaxes(x)
    elif operand == "input":
        triton_nvfp4.cast_rows(x, amax, block=block)
    elif operand == "grad":
        triton_nvfp4.cast_rows(x, amax, block=block, words=words)
    elif operand == "weight":
        triton_nvfp4.cast_rows(x.t(), amax, block=weight_block)
    else:
        triton_nvfp4.cast_columns(x, amax, words=words if operand == "grad_t" else None)


def _build_nvfp4() -> list[Launch]:
    """Amaxes and casts of NVFP4."""
    launches = []
    first, last = _capabilities(RECIPES["nvfp4"])
    for operand in ("amaxes", "input", "grad", "weight", "input_t", "grad_t"):
        kernel = "_nvfp4_amaxes" if operand == "amaxes" else "_nvfp4_cast"
        for name in ("bf16", "fp32"):
            run = partial(_nvfp4, operand, FLOATS[name])
            is_typical = operand in ("amaxes", "grad_t") and name == "bf16"
            launches.append(
                Launch(f"nvfp4 {operand} {name}", frozenset({kernel}), run, first, last, is_typical)
            )
    return launches


def _nvfp4_experts(operand: str, dtype: torch.dtype) -> None:
    """Amaxes of the tokens of experts in NVFP4, or the cast of one form or of matrices."""
    x = torch.zeros(TOKENS, WIDTH, dtype=dtype)
    amaxes = torch.ones(EXPERTS)
    words = ElementWords(torch.zeros(TOKENS, dtype=torch.int64), first_channel=WIDTH)
    matrices = torch.zeros(EXPERTS, WIDTH, WIDTH, dtype=dtype)
    if operand == "amaxes":
        triton_nvfp4_experts.expert_amaxes(x, _offs())
    elif operand == "weight":
        triton_nvfp4_experts.cast_matrices(matrices, amaxes)
    elif operand == "weight_t":
        triton_nvfp4_experts.cast_matrices(matrices.mT, amaxes)
    else:
        is_random = operand.startswith("grad")
        cast = triton_nvfp4_experts.cast_tokens
        if operand.endswith("_t"):
            cast = triton_nvfp4_experts.cast_channels
        cast(x, amaxes, offs=_offs(), words=words if is_random else None)


def _nvfp4_products(*, sums: bool, adds: bool) -> None:
    """A product of experts in NVFP4: of their tokens, or summed over their tokens."""
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    amaxes = torch.ones(EXPERTS)
    if not sums:
        a = triton_nvfp4_experts.cast_tokens(x, amaxes, offs=_offs())
        b = triton_nvfp4_experts.cast_matrices(x.view(EXPERTS, -1, WIDTH), amaxes)
        triton_nvfp4_experts.grouped_mm(a, b, offs=_offs(), sums=False, dtype=x.dtype)
        return
    a = triton_nvfp4_experts.cast_channels(x, amaxes, offs=_offs())
    out = torch.empty(EXPERTS, WIDTH, WIDTH)
    operands = [*a.tensors, *a.tensors, _offs()]
    triton_nvfp4_experts.write_grouped_mm(operands, out, adds=adds)


def _build_nvfp4_experts() -> list[Launch]:
    """Amaxes, casts and products of experts in NVFP4, also for cards without the dense products."""
    launches = []
    first, _ = _capabilities(RECIPES["nvfp4"])
    for operand in ("amaxes", "input", "grad", "weight", "weight_t", "input_t", "grad_t"):
        kernel = "_nvfp4_expert_amaxes" if operand == "amaxes" else "_nvfp4_expert_cast"
        for name in ("bf16", "fp32"):
            run = partial(_nvfp4_experts, operand, FLOATS[name])
            label = f"nvfp4 {operand} experts {name}"
            is_typical = operand in ("amaxes", "grad_t") and name == "bf16"
            launches.append(Launch(label, frozenset({kernel}), run, first, is_typical=is_typical))
    products = {"fprop": (False, False), "wgrad": (True, False), "wgrad added": (True, True)}
    for name, (sums, adds) in products.items():
        run = partial(_nvfp4_products, sums=sums, adds=adds)
        label = f"{name} nvfp4 experts"
        is_typical = not sums
        kernels = frozenset({"_multiply"})
        launches.append(Launch(label, kernels, run, first, is_typical=is_typical))
    return launches


def _build_wgrads() -> list[Launch]:
    """Weight gradients of experts in 16 bits."""
    launches = []
    for adds in (False, True):
        for name in ("bf16", "fp16"):
            label = f"grouped wgrad {'added ' * adds}{name}"
            run = partial(_grouped_wgrad, FLOATS[name], adds=adds)
            is_typical = adds and name == "bf16"
            launches.append(
                Launch(label, frozenset({"_grouped_wgrad"}), run, is_typical=is_typical)
            )
    return launches


def _scan(rule: str, head_dim: int) -> None:
    """Forward and backward of a scan with an initial state and documents."""
    heads, tokens = 2, 128
    groups = heads if rule == "kda" else 1
    vectors = torch.zeros(1, tokens, groups, head_dim, dtype=torch.bfloat16)
    value = torch.zeros(1, tokens, heads, head_dim, dtype=torch.bfloat16)
    decay = torch.zeros(1, tokens, heads, head_dim if rule == "kda" else 1)
    rate = torch.zeros(1, tokens, heads)
    documents = torch.zeros(1, tokens, dtype=torch.int32)
    sums = triton_chunk_scan.empty_sums(decay)
    inputs = Inputs(vectors, vectors, value, sums, rate, documents)
    sizes = triton_chunk_scan.scan_sizes(inputs, corrects=rule != "mamba2")
    state = torch.zeros(1, heads, head_dim, head_dim)
    prepared = triton_chunk_scan.prepare(inputs, sizes, decay=decay)
    dtype = torch.float32 if rule == "mamba2" else torch.bfloat16
    out, final = triton_chunk_scan.walk(inputs, prepared, initial=state, sizes=sizes, dtype=dtype)
    triton_chunk_scan_backward.scan_backward(
        inputs, state, sizes=sizes, grad_out=out, grad_final=final
    )


def _build_scans() -> list[Launch]:
    """Scans in bf16 on Hopper and Blackwell."""
    kernels = {"_prepare", "_walk", "_walk_back", "_chunk_gradients", "_sum_back"}
    launches = []
    for rule, head_dim in (
        ("mamba2", 128), ("gated_delta_net", 64), ("gated_delta_net", 128), ("kda", 128)
    ):  # fmt: skip
        names = kernels if rule == "mamba2" else kernels | {"_system_gradients"}
        run = partial(_scan, rule, head_dim)
        label = f"scan {rule} {head_dim} bf16"
        is_typical = head_dim == 64
        launches.append(Launch(label, frozenset(names), run, HOPPER, 109, is_typical))
    return launches


LAUNCHES = (
    *_build_rest(),
    *_build_wgrads(),
    *_build_amaxes(),
    *_build_casts(),
    *_build_computed_casts(),
    *_build_products(),
    *_build_nvfp4(),
    *_build_nvfp4_experts(),
    *_build_scans(),
)


def find_kernels() -> set[str]:
    """Names of the kernels of the package: `module:function`, of functions that none calls."""
    root = Path(nanotrain.__file__).parent
    functions: dict[str, str] = {}
    called: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if "triton.jit" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and _is_jit(node):
                functions[node.name] = f"{path.relative_to(root)}:{node.name}"
                called |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return {label for name, label in functions.items() if name not in called}


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark).startswith("triton.jit") for mark in function.decorator_list)
