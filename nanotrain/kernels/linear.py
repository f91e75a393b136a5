"""Linear layers, y = x W^T + b: their matrix products, and where weight gradients are written.

    fprop    y  = x W^T + b     [..., I], [O, I] -> [..., O]
    dgrad    dx = dy W          [T, O], [O, I] -> [T, I]
    wgrad    dW = dy^T x        [T, O], [T, I] -> [O, I], or written where gradients are accumulated

    Linear       the parameters of a layer and these products
    Linears      the products of layers that share an input; fp8/products.py has the fp8 form
    in_graph     a layer inside of a compiled graph
    GradView     a parameter's view of the gradient buffer, which products may write to

**Gradient views.** Megatron-LM calls it gradient accumulation fusion. Without it autograd allocates
every gradient and a hook copies or adds it to the buffer: a second pass over memory, and in 16 bits
a rounding in between. On CPUs it gains only for large weights (measured on one core, fp32: 0.75 of
the speed of a layer of 64 x 128, 1.00 of 256 x 768, 1.03 of 768 x 2048 and 1.06 of 2048 x 5632). A
backward that has written a gradient returns None for it. Autograd still runs the hooks of the
parameter once all its uses are complete, so some uses of a parameter may write their gradient and
others return it to autograd.

**Compiled graphs.** The view, and whether the product writes or adds, change between microbatches,
so a graph holds neither. Its backward calls the operator `nanotrain::write_wgrad`, which finds the
view when it runs.

    T tokens   I inputs   O outputs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.autograd import eager_or_graph
from nanotrain.kernels.fp8.layer import Fp8Layer

# A copy of this size stays in the cache, and its memory is used again: measured on one core, adding
# [8192, 384] from bf16 to fp32 took 1.8 to 4.0 ms at once and 1.1 to 1.4 ms in parts of this size.
CAST_ELEMENTS = 2**18


def dgrad(grad: Tensor, weight: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """[T, O], [O, I] -> [T, I], added to `add_to` in place where it is given."""
    if add_to is None:
        return grad @ weight
    return add_to.addmm_(grad, weight)


def wgrad(grad: Tensor, x: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """[T, O], [T, I] -> [O, I], added to `add_to` in place where it is given.

    `add_to` may be fp32 where the operands have 16 bits.
    """
    if add_to is None:
        return grad.t() @ x
    if add_to.dtype is grad.dtype:
        return add_to.addmm_(grad.t(), x)
    if adds_wider(grad.device.type):
        return torch.addmm(add_to, grad.t(), x, out_dtype=add_to.dtype, out=add_to)
    return add_cast(add_to, grad.t() @ x)


def add_cast(total: Tensor, product: Tensor) -> Tensor:
    """Add a 16-bit matrix to an fp32 one in place.

    On CPUs some rows at a time, because torch casts them into a copy.
    """
    num_rows = len(total)
    if total.device.type == "cpu":
        num_rows = max(1, CAST_ELEMENTS // total.shape[1])
    for part, added in zip(total.split(num_rows), product.split(num_rows), strict=True):
        part += added
    return total


def write_wgrad(grad: Tensor, x: Tensor, *, out: Tensor, adds: bool = False) -> None:
    """[T, O], [T, I] -> `out` [O, I], written, or added to its values.

    `out` may be fp32 where the operands have 16 bits.
    """
    if adds:
        wgrad(grad, x, add_to=out)
    elif out.dtype is grad.dtype:
        torch.mm(grad.t(), x, out=out)
    elif adds_wider(grad.device.type):
        torch.mm(grad.t(), x, out_dtype=out.dtype, out=out)
    else:
        out.copy_(wgrad(grad, x))


def adds_wider(device_type: str) -> bool:
    """Whether a product of 16-bit matrices can be added to an fp32 matrix in one kernel.

    cuBLAS can; the meta device has these products from torch 2.13 on.
    """
    if device_type == "meta":
        return torch.__version__ >= "2.13"  # compared as versions
    return device_type == "cuda"


# The gradient memory of a parameter, and whether it already holds gradients of this step.
WriteTarget = tuple[Tensor, bool]


@dataclass(frozen=True)
class GradView:
    """Access to the gradient buffer of one parameter, for products that write wgrad there.

    The data-parallel wrapper sets it as the attribute `grad_view` of the parameter.
    """

    dtype: torch.dtype
    # None outside of a backward of the wrapper: return the gradient to autograd
    start_write: Callable[[], WriteTarget | None]
    # all gradients of a backward are written, and autograd runs no hook
    mark_ready: Callable[[], None]
    # `start_write` in the forward pass of a step, for a use whose gradient is complete there
    start_write_ahead: Callable[[], WriteTarget | None] = lambda: None
    # the gradient memory, if it stays at one address
    memory: Tensor | None = None
    # `start_write` in a compiled graph; None: graphs return the gradient to autograd
    start_write_in_graph: Callable[[], WriteTarget | None] | None = None

    def accumulate(self, grad: Tensor, x: Tensor) -> bool:
        """Write or add grad^T x, of [T, O] and [T, I]; False if it cannot be written now."""
        target = self.start_write()
        if target is None:
            return False
        view, has_grads = target
        write_wgrad(grad, x, out=view, adds=has_grads)
        return True


def attach(view: GradView, param: Tensor) -> None:
    """Let products of this parameter write its gradient by the `GradView`."""
    param.grad_view = view  # type: ignore[attr-defined]
    # A graph gets the weight that autograd saved, after recomputation another tensor without the
    # attribute. Both share the storage, in which the offset identifies a parameter. The storage
    # refers to its views weakly: a view refers to the buffer, and Python's garbage collector cannot
    # follow the references of a storage.
    storage = param.untyped_storage()
    views = getattr(storage, "grad_views", None) or WeakValueDictionary()
    views[param.storage_offset()] = view
    storage.grad_views = views  # type: ignore[attr-defined]


def grad_view_of(param: Tensor) -> GradView | None:
    """The `GradView` of a parameter; None if autograd accumulates its gradient in `.grad`."""
    view: GradView | None = getattr(param, "grad_view", None)
    return view


def grad_view_in_graph(weight: Tensor) -> GradView | None:
    """The `GradView` of a weight that autograd saved, found by its storage and offset."""
    views: Any = getattr(weight.untyped_storage(), "grad_views", {})
    view: GradView | None = views.get(weight.storage_offset())
    return view


class Linear(nn.Module):
    """The parameters of one layer, and its products.

    Args:
        weight: [O, I].
        bias: [O], or None.
        fp8: how the layer uses fp8; None: it does not.
        rows: outputs that this rank computes; the gradients of other rows are zero. None: all.
        adds_bias: whether the products include the bias.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        fp8: Fp8Layer | None = None,
        rows: slice | None = None,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.fp8 = fp8
        self.rows = rows
        self.adds_bias = adds_bias

    @property
    def trained_params(self) -> tuple[nn.Parameter, ...]:
        """The weight and the bias that require a gradient."""
        params = [self.weight]
        if self.bias is not None and self.adds_bias:
            params.append(self.bias)
        return tuple(param for param in params if param.requires_grad)

    @property
    def writes_wgrad(self) -> bool:
        """Whether the product writes wgrad to the gradient buffer."""
        if self.rows is not None or not self.weight.requires_grad:
            return False
        return grad_view_of(self.weight) is not None

    @property
    def used_weight(self) -> Tensor:
        """The rows that this rank multiplies with."""
        return self.weight if self.rows is None else self.weight[self.rows]

    @property
    def used_bias(self) -> Tensor | None:
        """The bias of the rows of `used_weight`; None where the products include no bias."""
        if self.bias is None or not self.adds_bias:
            return None
        return self.bias if self.rows is None else self.bias[self.rows]

    def fprop(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return F.linear(x, self.used_weight, self.used_bias)

    @property
    def writes_in_graph(self) -> bool:
        """Whether the product writes the weight's gradient in a compiled graph too."""
        if not CAN_TRACE or not self.writes_wgrad:
            return False
        view = grad_view_of(self.weight)
        return view is not None and view.start_write_in_graph is not None

    def wgrad(self, grad: Tensor, x: Tensor) -> list[Tensor | None]:
        """[T, O], [T, I] -> the gradients of `trained_params`, None for one that was written."""
        if not self.weight.requires_grad or _write_wgrad(self, grad, x=x):
            return self.param_grads(grad, None)
        return self.param_grads(grad, wgrad(grad, x))

    def param_grads(self, grad: Tensor, grad_weight: Tensor | None) -> list[Tensor | None]:
        """[T, O], the gradient of the used rows -> the gradients of `trained_params`."""
        gradients = []
        for param in self.trained_params:
            used = grad_weight if param is self.weight else grad.sum(0)
            gradients.append(self._all_rows(used, param))
        return gradients

    def _all_rows(self, grad: Tensor | None, param: Tensor) -> Tensor | None:
        """The gradient of a parameter from the gradient of its used rows."""
        if grad is None or self.rows is None:
            return grad
        padded = grad.new_zeros(param.shape)
        padded[self.rows] = grad
        return padded


def _write_eagerly(linear: Linear, grad: Tensor, *, x: Tensor) -> bool:
    """Write wgrad to the gradient buffer; returns whether it was written."""
    view = grad_view_of(linear.weight) if linear.writes_wgrad else None
    return view is not None and view.accumulate(grad, x)


def _write_by_operator(linear: Linear, grad: Tensor, *, x: Tensor) -> bool:
    """Write wgrad by an operator of a compiled graph; returns whether a graph can do so."""
    if not linear.writes_in_graph:
        return False
    write_in_graph(linear.weight, (grad, x))
    return True


_write_wgrad = eager_or_graph(_write_eagerly, _write_by_operator)


class Linears:
    """The products of layers that share an input, for one microbatch.

    `records` is an argument of the fp8 form.
    """

    def __init__(self, linears: Sequence[Linear], *, records: bool = False) -> None:
        self.linears = linears

    def fprop(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> one [..., O] per layer."""
        return tuple(linear.fprop(x) for linear in self.linears)

    @property
    def has_wgrad(self) -> bool:
        """Whether a parameter is trained."""
        return any(linear.trained_params for linear in self.linears)

    @property
    def weights(self) -> Sequence[Tensor]:
        """One [O, I] per layer."""
        return [linear.used_weight.detach() for linear in self.linears]

    @property
    def biases(self) -> Sequence[Tensor | None]:
        """The biases [O] that the products include, one or None per layer."""
        return [linear.used_bias for linear in self.linears]

    def dgrad(self, grads: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, I], their sum."""
        first, *others = zip(grads, self.weights, strict=True)
        total = dgrad(*first)
        for pair in others:
            dgrad(*pair, add_to=total)
        return total

    def wgrad(self, grads: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
        """One [T, O] per layer, [T, I] -> the gradients of the trained parameters.

        None for a gradient that was written where it is accumulated.
        """
        gradients: list[Tensor | None] = []
        for grad, linear in zip(grads, self.linears, strict=True):
            gradients.extend(linear.wgrad(grad, x))
        return gradients


class LinearsInGraph(Linears):
    """The products of weights that autograd saved in a graph.

    Args:
        weights: one [O, I] per layer.
        writes: whether the gradient of each weight is written where it is accumulated.
        trains: whether each weight has a gradient.
    """

    weights: Sequence[Tensor] = ()
    has_wgrad: bool = True

    def __init__(
        self, weights: Sequence[Tensor], writes: Sequence[bool], *, trains: Sequence[bool]
    ) -> None:
        super().__init__(())
        self.weights = weights
        self._writes = writes
        self._trains = trains
        self.has_wgrad = any(trains)

    def wgrad(self, grads: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
        """One [T, O] per layer, [T, I] -> the gradients; None for one that was written."""
        computed: list[Tensor | None] = []
        for grad, weight, is_written, is_trained in zip(
            grads, self.weights, self._writes, self._trains, strict=True
        ):
            if not is_trained:
                computed.append(None)
            elif is_written:
                _write_saved(weight, (grad, x))
                computed.append(None)
            else:
                computed.append(wgrad(grad, x))
        return computed


def in_graph(x: Tensor, linear: Linear) -> Tensor:
    """[..., I] -> [..., O] inside of a graph.

    Its backward returns None for a weight gradient that it writes where it is accumulated.
    """
    if linear.writes_in_graph and torch.is_grad_enabled():
        out: Tensor = _LinearInGraph.apply(x, linear.weight, linear.used_bias)
        return out
    return linear.fprop(x)


class _LinearInGraph(torch.autograd.Function):
    """A linear layer whose wgrad is written to its buffer inside a compiled graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., I], weight [O, I] -> [..., O]."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        """Write wgrad into the gradient buffer of the parameter; return the other gradients."""
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        torch.ops.nanotrain.write_wgrad(weight, (grad, rows))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = dgrad(grad, weight).view(x.shape)
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, None, grad_bias


@torch.library.custom_op("nanotrain::write_wgrad", mutates_args=())
def write_in_graph(weight: Tensor, operands: Sequence[Tensor]) -> None:
    """Write dW = grad^T x to the gradient buffer, or add it after the first microbatch.

    Args:
        weight: the weight that autograd saved.
        operands: grad [T, O] and x [T, I].
    """
    _write_saved(weight, operands)


def _write_saved(weight: Tensor, operands: Sequence[Tensor]) -> None:
    """Write the gradient of a weight from its saved operands, inside a compiled graph."""
    grad, x = operands
    view, has_grads = target_in_graph(weight)
    write_wgrad(grad, x, out=view, adds=has_grads)


def target_in_graph(weight: Tensor) -> WriteTarget:
    """The target of a weight that autograd saved.

    Raises:
        RuntimeError: the backward is not part of a step, so nothing would receive the gradient.
    """
    view = grad_view_in_graph(weight)
    target = None
    if view is not None and view.start_write_in_graph is not None:
        target = view.start_write_in_graph()
    if target is None:
        raise RuntimeError(
            "compiled blocks write weight gradients to the gradient buffer, and this backward is "
            "outside of a training step: use --no-gradient-accumulation-fusion or "
            "--no-torch-compile"
        )
    return target


# torch 2.10 fails to partition effects of a backward, so its graphs return gradients.
CAN_TRACE = torch.__version__ >= "2.11"  # compared as versions


def keep_in_graphs(operator: Any) -> None:
    """Keep an operator without outputs in compiled graphs, which else would remove it."""
    operator.register_fake(lambda *_, **__: None)
    declare_effect(operator)


def declare_effect(operator: Any) -> None:
    """Keep an operator in graphs, and its order among others with an effect."""
    if CAN_TRACE:
        from torch._library.effects import EffectType

        operator.register_effect(EffectType.ORDERED)


keep_in_graphs(write_in_graph)
