# SPDX-License-Identifier: Apache-2.0
"""The ``ttrace`` command. Each subcommand is a module with ``add_parser`` and ``run``."""
