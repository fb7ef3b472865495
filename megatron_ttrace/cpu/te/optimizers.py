# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's optimizers: Apex's, with the arguments that Megatron adds."""

from typing import Any

from megatron_ttrace.cpu import optimizers


class FusedAdam(optimizers.FusedAdam):
    """Adam; low-precision moments and own master weights need the kernels."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        master_weight_dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        if use_decoupled_grad or store_param_remainders:
            raise NotImplementedError(
                "the precision-aware optimizer needs TransformerEngine's kernels"
            )
        super().__init__(params, *args, **kwargs)


FusedSGD = optimizers.FusedSGD
