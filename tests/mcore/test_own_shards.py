# SPDX-License-Identifier: Apache-2.0
"""Which updates depend on the layout by design."""

import argparse

import pytest

from megatron_ttrace.mcore.own_shards import depends_on_layout, is_matrix, ranks_of_blocks
from megatron_ttrace.trace.records import Kind

MUON = {"optimizer": "muon", "muon_tp_mode": "blockwise"}
BLOCKWISE = "--optimizer muon --muon-tp-mode blockwise"
WHOLE = {"tensor_model_parallel_size": 1}


def arguments(**values):
    """Megatron's, with two tensor-parallel ranks."""
    return argparse.Namespace(**{"tensor_model_parallel_size": 2, **values})


@pytest.mark.parametrize(
    ("values", "option"),
    [
        (MUON, BLOCKWISE),
        ({**MUON, "optimizer": "dist_muon"}, BLOCKWISE),
        ({**MUON, "muon_tp_mode": "duplicated"}, ""),
        ({**MUON, **WHOLE}, ""),
        ({**MUON, **WHOLE, "expert_tensor_parallel_size": 2}, BLOCKWISE),
        ({"optimizer": "soap"}, "--optimizer soap"),
        ({"optimizer": "soap", **WHOLE, "gtp_weight_remat_size": 2}, "--optimizer soap"),
        ({**MUON, **WHOLE, "gtp_weight_remat_size": 2}, BLOCKWISE),
        ({"optimizer": "adam", "muon_tp_mode": "blockwise"}, ""),
    ],
)
def test_where_a_rank_steps_a_part_of_a_matrix(values, option):
    """Only there; Muon's momentum is a mean of gradients and is judged all the same."""
    kinds, named = depends_on_layout(arguments(**values))
    assert named == option
    assert (Kind.PARAM_DELTA in kinds) == bool(option)
    assert (Kind.EXP_AVG in kinds) == (option == "--optimizer soap")
    assert Kind.MAIN_GRAD not in kinds


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({**MUON, "expert_tensor_parallel_size": 4}, [2, 4]),
        ({**MUON, "optimizer": "dist_muon"}, [2, 1]),
        ({**MUON, "optimizer": "adaptive_muon"}, [1, 1]),
        ({**MUON, "gtp_weight_remat_size": 2}, [1, 1]),
        ({**MUON, "muon_tp_mode": "duplicated"}, [1, 1]),
        ({"optimizer": "soap"}, [1, 1]),
    ],
)
def test_where_a_reference_steps_in_blocks(values, ranks):
    """Where nothing but the momentum of a block counts."""
    assert ranks_of_blocks(arguments(**values)) == ranks


def test_matrices():
    """Embeddings and vectors are stepped by Adam."""
    assert is_matrix("decoder.layers.0.mlp.linear_fc1.weight", (8, 4))
    assert not is_matrix("decoder.layers.0.mlp.linear_fc1.bias", (8,))
    assert not is_matrix("embedding.word_embeddings.weight", (8, 4))
