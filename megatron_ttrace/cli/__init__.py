# SPDX-License-Identifier: Apache-2.0
"""Every command. Only ``add_parser`` is light; a command imports what it needs when it runs."""
