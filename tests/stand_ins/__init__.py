# SPDX-License-Identifier: Apache-2.0
"""Packages that Megatron imports, as far as it uses them: put this folder on ``PYTHONPATH``."""
