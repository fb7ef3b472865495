# SPDX-License-Identifier: Apache-2.0
"""The trusted single-device run: its arguments, its identity, its making, its perturbed replays."""
