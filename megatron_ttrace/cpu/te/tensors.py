# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's tensor classes, for ``isinstance`` questions.

On a CPU parameters stay unrounded and FP8 operands live for the time of one product, so no tensor
of these classes is ever made: every such question is answered "no".
"""

import torch


class QuantizedTensor(torch.Tensor):
    """Base class of tensors stored in FP8."""


class Float8Tensor(QuantizedTensor):
    """A tensor with one scale."""


class Float8BlockwiseQTensor(QuantizedTensor):
    """A tensor with a scale for each block of 128."""


class MXFP8Tensor(QuantizedTensor):
    """A tensor with a scale for each block of 32."""
