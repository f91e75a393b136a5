"""`Recompute`: parts of a stage that are computed again in the backward pass, instead of keeping their activations.

    checkpointed   make a function keep only its inputs (torch.utils.checkpoint, non-reentrant)
    wrap           the same for a named module, if that module is recomputed
    chain          compose two functions; if the first is recomputed, its output is not kept either

    name          recomputes                                  how
    core_attn     core attention                              wrap
    mlp           dense MLP                                   wrap
    moe           mixture-of-experts layer, router included   wrap
    layernorm     both norms of a block                       chain
    mla_up_proj   up-projections and rotary positions of MLA  chain
    moe_act       activation of the experts                   chain

A module gets the callable for its forward once, when it is built. Names and meaning are those of Megatron-LM's
`--recompute-modules`. Source: Chen et al. 2016; Korthikanti et al. 2022, section 5, for selective recomputation.

Parameters are not copied: the second run reads them during the backward pass, before the optimizer step changes them.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils.checkpoint import checkpoint

from nanotrain.comm.autograd import eager
from nanotrain.memory.discard import discard_output

TensorFunction = Callable[..., Any]


class Recompute:
    """The recomputed modules of one stage, and whether it is recomputing now.

    Args:
        modules: names of the modules that are recomputed.

    Attributes:
        is_recomputing: True while a function runs for the second time. Side effects of a forward pass (statistics,
            storage of gathered parameters) must not happen again then.
    """

    def __init__(self, modules: Collection[str] = ()) -> None:
        self._modules = frozenset(modules)
        self.is_recomputing = False

    def includes(self, name: str) -> bool:
        """Whether the named module is recomputed."""
        return name in self._modules

    def checkpointed(self, function: TensorFunction) -> TensorFunction:
        """A function with the same result that keeps its arguments and is run again when its backward begins."""

        def run(*args: Any, **options: Any) -> Any:
            names, num_args = tuple(options), len(args)  # `call` must not reference the tensors: they may be discarded

            def call(*values: Any) -> Any:
                return function(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

            # All arguments are positional: torch keeps those through saved-tensor hooks, which may discard them.
            values = (*args, *options.values())
            # No block draws from the random state of torch: dropout masks are a function of samples.
            return checkpoint(call, *values, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts)

        return eager(run)

    def wrap(self, name: str, function: TensorFunction) -> TensorFunction:
        """`checkpointed` where the named module is recomputed, else the function itself."""
        return self.checkpointed(function) if name in self._modules else function

    def chain(self, name: str, first: TensorFunction, *, second: TensorFunction) -> TensorFunction:
        """The function `(*inputs, **options) -> second(first(*inputs), **options)`; see `discard_output`.

        A tuple of outputs becomes several arguments of `second`.
        """
        if name in self._modules:
            return eager(discard_output(self.checkpointed, first, second=second))

        def run(*inputs: Any, **options: Any) -> Any:
            outputs = first(*inputs)
            return second(*(outputs if isinstance(outputs, tuple) else (outputs,)), **options)

        return run

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Entered around the first and around the second run of a function."""
        return nullcontext(), self._recomputing()

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        before, self.is_recomputing = self.is_recomputing, True
        try:
            yield
        finally:
            self.is_recomputing = before
