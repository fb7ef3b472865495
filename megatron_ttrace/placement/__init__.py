# SPDX-License-Identifier: Apache-2.0
"""How a rank's local tensor sits in the logical tensor. Pure: no tensors, no processes.

Planning turns a list of placements, one per mesh axis, outermost first, into *boxes*; comparing,
merging and coverage use boxes only.
"""
