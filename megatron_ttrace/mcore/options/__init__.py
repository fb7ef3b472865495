# SPDX-License-Identifier: Apache-2.0
"""One decision for every option of Megatron: what a reference and a shrunk job make of it."""
