# SPDX-License-Identifier: Apache-2.0
"""What all of TransformerEngine's modules share: parameters, weight gradients, parallelism."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from megatron_ttrace.cpu.te.fp8 import ScaledModule
from megatron_ttrace.cpu.te.norms import materialise
from megatron_ttrace.cpu.te.parallel import TensorParallel, group_size

InitMethod = Callable[[torch.Tensor], Any]

#: Computations of weight gradients that one layer's backward passes put off, first in, first out.
#: Pipeline schedules use them (``delay_wgrad_compute``) to send the input's gradient on before the
#: weight's is known. The numbers are the same; only the time differs.
Queue = deque[Callable[[], torch.Tensor]]


def now_or_later(queue: Queue | None, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Compute, or put the computation off and give autograd no gradient."""
    if queue is None:
        return compute()
    queue.append(compute)
    return None


def default_init(tensor: torch.Tensor) -> torch.Tensor:
    """Draw weights as TransformerEngine does when it is given no initialiser."""
    return torch.nn.init.normal_(tensor, mean=0.0, std=0.023)


class ParameterInit(NamedTuple):
    """How a parameter gets its initial value, and its place among the FP8 tensors."""

    init_fn: InitMethod
    get_rng_state_tracker: Callable[[], Any] | None
    fp8_meta_index: int | None = None


class TransformerEngineBaseModule(ScaledModule):
    """Base class; Megatron asks for it by this name."""

    rng_tracker_name: str | None = None
    """Set on a ``LayerNormLinear``, which does not take it as an argument, before it is made
    (``_gtp_pre_init`` in megatron/core/extensions/transformer_engine.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.parallel_mode: str | None = None
        self.get_rng_state_tracker: Callable[[], Any] | None = None
        self.primary_weights_in_fp8 = False
        self.param_init_meta: dict[str, ParameterInit] = {}
        self.wgrad_queue: Queue | None = None
        self._after_backward_dw: list[Callable[[], Any]] = []

    # Parameters

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Any,
        init: InitMethod,
        tracked: bool = False,
    ) -> torch.nn.Parameter:
        """Make and initialise a parameter; ``tracked`` ones draw from the named random state.

        On the meta device only the shape is made; ``reset_parameters`` fills it later.
        """
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.register_parameter(name, parameter)
        tracker = self.get_rng_state_tracker if tracked else None
        self.param_init_meta[name] = ParameterInit(init, tracker)
        if not parameter.is_meta:
            self._initialise(name)
        return parameter

    def _initialise(self, name: str) -> None:
        how = self.param_init_meta[name]
        context: Any = nullcontext()
        if how.get_rng_state_tracker is not None:
            names = () if self.rng_tracker_name is None else (self.rng_tracker_name,)
            context = how.get_rng_state_tracker().fork(*names)
        with torch.no_grad(), context:
            how.init_fn(getattr(self, name))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Give every parameter an initial value, and memory if it lies on the meta device."""
        if defer_init:
            return
        for name, parameter in list(self.named_parameters(recurse=False)):
            if name not in self.param_init_meta:
                continue
            materialise(self, name, parameter)
            self._initialise(name)
        # Whoever calls this may have replaced the parameters: Megatron-FSDP, on the meta device.
        self.mark_parameters()

    def mark_parameters(self) -> None:
        """Set the attributes that tell Megatron how the parameters are divided, if they are."""

    def mark_partitioned(self, parameter: torch.nn.Parameter, dim: int) -> None:
        """Tell Megatron along which dim a parameter is cut over the tensor-parallel ranks."""
        attributes: Any = parameter
        attributes.tensor_model_parallel = True
        attributes.partition_dim = dim
        attributes.partition_stride = 1

    # Delayed weight gradients

    def delay_gradients(self) -> None:
        """Leave the weights' gradients to :meth:`backward_dw`.

        Autograd never accumulates them. By the mark, Megatron's data-parallel wrappers know that
        they must collect them after :meth:`backward_dw`.
        """
        self.wgrad_queue = deque()
        for weight in self.product_weights():
            weight.skip_backward_post_hook = True

    def product_weights(self) -> list[Any]:
        """The weights of the products, in their order."""
        return [self.weight]

    def need_backward_dw(self) -> bool:
        """Whether :meth:`backward_dw` must be called after the backward pass."""
        return self.wgrad_queue is not None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Call ``hook`` whenever :meth:`backward_dw` has computed the gradients."""
        self._after_backward_dw.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest backward pass put off.

        They replace what the weights had: whoever collects gradients takes each microbatch's away.
        """
        if self.wgrad_queue is None:
            return
        with torch.no_grad():
            for weight in self.product_weights():
                weight.grad = self.wgrad_queue.popleft()().to(weight.dtype)
        for hook in self._after_backward_dw:
            hook()

    # Parallelism

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group after construction, when process groups did not exist yet."""
        self.tp_group = tp_group

    def layout(self) -> TensorParallel:
        """How this layer is cut; a size with no group yet does not communicate."""
        size = group_size(self.tp_group)
        return TensorParallel(self.tp_group, size, self.parallel_mode, self.sequence_parallel)
