# SPDX-License-Identifier: Apache-2.0
"""Everything that knows Megatron's names: flags, arguments, modules, parameters, releases."""
