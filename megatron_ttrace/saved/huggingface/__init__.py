# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face's transformers as references of Megatron's."""
