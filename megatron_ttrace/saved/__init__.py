# SPDX-License-Identifier: Apache-2.0
"""From traces to answers: of a running job, of saved runs, of checkpoints."""
