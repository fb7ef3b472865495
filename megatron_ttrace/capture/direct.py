# SPDX-License-Identifier: Apache-2.0
"""Hooks of a module whose ``forward`` is called directly, which skips ``torch``'s hooks.

``MegatronFSDP.forward`` does so with the whole model before 0.19
(megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py). The module's other hooks are
skipped then as they are without us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Hook = Callable[..., Any]


class DirectCalls:
    """Calls hooks in direct calls of a module's ``forward`` until it is removed."""

    def __init__(
        self, module: torch.nn.Module, before: Sequence[Hook], after: Sequence[Hook]
    ) -> None:
        """Put a function in the place of ``module.forward``.

        Args:
            module: whose calls are hooked.
            before: as forward pre-hooks with keywords.
            after: as forward hooks with keywords.
        """
        self._module = module
        self._before, self._after = before, after
        self._forward = module.forward
        self._own = vars(module).get("forward")
        self._has_hooks = False
        self._handle = module.register_forward_pre_hook(self._called)
        module.forward = self._run

    def remove(self) -> None:
        """Put everything back; a second call does nothing."""
        self._handle.remove()
        if vars(self._module).get("forward") == self._run:
            del self._module.forward
            if self._own is not None:
                self._module.forward = self._own

    def _called(self, *_: Any) -> None:
        self._has_hooks = True

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        has_hooks, self._has_hooks = self._has_hooks, False
        if has_hooks:
            return self._forward(*args, **kwargs)
        for hook in self._before:
            args, kwargs = hook(self._module, args, kwargs) or (args, kwargs)
        output = self._forward(*args, **kwargs)
        for hook in self._after:
            instead = hook(self._module, args, kwargs, output)
            output = output if instead is None else instead
        return output
