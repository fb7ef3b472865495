# SPDX-License-Identifier: Apache-2.0
"""Permutation, rotary embedding, cross entropy, router, recomputation, lists of tensors."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ttrace.cpu.te import gemm, optimizers, permutation, releases, router
from megatron_ttrace.cpu.te.cross_entropy import parallel_cross_entropy
from megatron_ttrace.cpu.te.distributed import CudaRNGStatesTracker, checkpoint
from megatron_ttrace.cpu.te.rope import apply_rotary_pos_emb
from tests.cpu.te.ranks import close, run_ranks, same_gradients


@pytest.fixture
def routing():
    torch.manual_seed(2)
    probs = torch.rand(5, 3, dtype=torch.float64)
    routing_map = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 1]]).bool()
    return torch.randn(5, 4, dtype=torch.float64), probs * routing_map, routing_map


def test_rows_are_sorted_by_expert_then_token(routing):
    tokens, probs, routing_map = routing
    rows, weights, _ = permutation.moe_permute_with_probs(tokens, probs, routing_map, 9)
    order = [(t, e) for e in range(3) for t in range(5) if routing_map[t, e]]
    assert torch.equal(rows, torch.stack([tokens[t] for t, _ in order]))
    assert torch.equal(weights, torch.stack([probs[t, e] for t, e in order]))


def test_permute_refuses_to_return_no_rows():
    """As TransformerEngine does, unless there are no tokens either."""
    with pytest.raises(AssertionError, match="num_out_tokens"):
        permutation.moe_permute(torch.randn(3, 2), torch.zeros(3, 4, dtype=torch.bool), 0)
    rows, _ = permutation.moe_permute(torch.randn(0, 2), torch.zeros(0, 4, dtype=torch.bool), 0)
    assert rows.shape == (0, 2)


def test_unpermute_is_the_weighted_sum(routing):
    tokens, probs, routing_map = routing
    tokens, probs = tokens.requires_grad_(), probs.requires_grad_()
    rows, row_map = permutation.moe_permute(tokens, routing_map, 9)
    ours = permutation.moe_unpermute(rows, row_map, probs, tokens.shape)
    theirs = tokens * probs.masked_fill(~routing_map, 0).sum(-1, keepdim=True)
    same_gradients(ours, theirs, (tokens, probs))


def test_chunks():
    x = torch.arange(6.0)[:, None]
    sizes, order = torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
    rows, weights = permutation.moe_sort_chunks_by_index_with_probs(x, x[:, 0], sizes, order)
    assert weights.tolist() == [3, 4, 5, 0, 1, 2]
    assert torch.equal(rows[:, 0], weights)


def test_padding_and_back():
    x = torch.randn(5, 3)
    padded, sizes = permutation.Fp8Padding(2, 4)(x, [2, 3])
    assert sizes == [4, 4]
    assert padded[2:4].abs().sum() == 0
    assert torch.equal(permutation.Fp8Unpadding(2, 4)(padded, [2, 3]), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_keeps_lengths_and_relative_angles(interleaved):
    """Rotating by i and by j leaves a product that depends on j - i only."""
    torch.manual_seed(0)
    steps = 0.3 ** torch.arange(3).double()
    steps = steps.repeat_interleave(2) if interleaved else steps.repeat(2)
    freqs = torch.arange(8.0).double()[:, None, None, None] * steps
    q, k = (torch.randn(8, dtype=torch.float64).expand(8, 1, 1, 8) for _ in range(2))
    q, k = (apply_rotary_pos_emb(t, freqs, interleaved=interleaved) for t in (q, k))
    products = torch.einsum("sbhd,tbhd->st", q, k)
    for shift in range(8):
        diagonal = products.diagonal(shift)
        close(diagonal, diagonal[:1].expand_as(diagonal))
    assert torch.equal(q[..., 6:], q[:1, ..., 6:].expand(8, 1, 1, 2))


def test_packed_sequences_start_at_angle_zero():
    freqs = torch.arange(8.0)[:, None, None, None] * torch.tensor([1.0, 0.1]).repeat(2)
    t = torch.randn(6, 2, 4)
    ours = apply_rotary_pos_emb(t, freqs, tensor_format="thd", cu_seqlens=torch.tensor([0, 2, 6]))
    for start, end in ((0, 2), (2, 6)):
        close(ours[start:end], apply_rotary_pos_emb(t[start:end, None], freqs)[:, 0])
    halves = [
        apply_rotary_pos_emb(
            t[rows], freqs, "thd", cu_seqlens=torch.tensor([0, 4]), cp_size=2, cp_rank=rank
        )
        for rank, rows in enumerate(([0, 3], [1, 2]))
    ]
    whole = apply_rotary_pos_emb(t[:4], freqs, "thd", cu_seqlens=torch.tensor([0, 4]))
    close(halves[0], whole[[0, 3]])
    close(halves[1], whole[[1, 2]])


def check_cross_entropy(rank):
    torch.manual_seed(4)
    logits = torch.randn(3, 2, 6, dtype=torch.float64)
    target = torch.tensor([[0, 5], [3, -100], [2, 1]])
    grad = torch.randn(3, 2, dtype=torch.float64)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none").view(3, 2)
    expected.backward(grad)
    part = logits.chunk(2, -1)[rank].clone().requires_grad_()
    ours = parallel_cross_entropy(part, target, 0.0, False, dist.group.WORLD)
    ours.backward(grad)
    close(ours, expected)
    close(part.grad, whole.grad.chunk(2, -1)[rank])


def test_cross_entropy_over_a_cut_vocabulary():
    run_ranks(2, check_cross_entropy)


@pytest.mark.parametrize("pre", [False, True])
def test_router_chooses_the_best_experts(pre):
    torch.manual_seed(0)
    logits = torch.randn(7, 6, requires_grad=True)
    weights, chosen = router.fused_topk_with_score_function(
        logits, 2, pre, None, None, None, "softmax", None
    )
    indices = logits.topk(2).indices
    assert torch.equal(chosen, torch.zeros(7, 6).scatter(1, indices, 1).bool())
    expected = torch.softmax(logits, -1) if pre else torch.softmax(logits.gather(1, indices), -1)
    expected = expected.gather(1, indices) if pre else expected
    close(weights.gather(1, indices), expected, 1e-6)
    assert weights.masked_fill(chosen, 0).abs().sum() == 0


def is_rounded_once(actual, exact):
    return bool(((actual - exact).abs() <= 1.01 * 2.0**-8 * exact.abs()).all())


def test_router_computes_in_float32():
    """Scores are float32 and weights are rounded to the logits' type once, at the end."""
    torch.manual_seed(0)
    logits = torch.randn(30, 8).bfloat16()
    _, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")
    assert scores.dtype == torch.float32
    weights, chosen = router.fused_topk_with_score_function(
        logits, 2, False, None, None, None, "sigmoid", None
    )
    kept = torch.sigmoid(logits.double()) * chosen
    assert is_rounded_once(weights.double(), kept / kept.sum(-1, keepdim=True))


def test_scores_for_the_auxiliary_loss_sum_to_one():
    """With one expert per token too; another score function is refused."""
    for function in ("softmax", "sigmoid", "sqrtsoftplus"):
        _, scores = router.fused_compute_score_for_moe_aux_loss(torch.randn(3, 4), 1, function)
        close(scores.sum(-1), torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match="score function"):
        router.fused_compute_score_for_moe_aux_loss(torch.randn(3, 4), 1, "tanh")


@pytest.mark.parametrize("release", ["2.9.0", "2.17.1", "2.18.0", "2.19.0.dev0"])
def test_cross_entropy_is_rounded_as_by_the_release(release, monkeypatch):
    """Until 2.17 twice, in the logits' type."""
    monkeypatch.setattr(releases, "current", lambda: release)
    logits = torch.randn(64, 32).bfloat16().requires_grad_()
    target = torch.arange(64) % 32
    parallel_cross_entropy(logits, target).sum().backward()
    gradient = logits.detach().float().softmax(-1)
    if release in ("2.9.0", "2.17.1"):
        gradient = gradient.bfloat16().float()
    gradient -= F.one_hot(target, 32)
    assert torch.equal(logits.grad, gradient.bfloat16())


@pytest.mark.parametrize("option", [{"reduce_loss": True}, {"label_smoothing": 0.1}])
def test_cross_entropy_that_megatron_does_not_ask_for(option):
    with pytest.raises(NotImplementedError, match="smoothed labels"):
        parallel_cross_entropy(torch.randn(3, 1, 8), torch.zeros(3, 1).long(), **option)


def test_router_with_groups_chooses_inside_the_best():
    logits = torch.tensor([[0.9, 0.1, 0.8, 0.7]])
    _, chosen = router.fused_topk_with_score_function(
        logits, 2, False, 2, 1, None, "sigmoid", torch.zeros(4)
    )
    assert chosen.tolist() == [[False, False, True, True]]


def test_recomputation_draws_the_same_random_numbers():
    torch.manual_seed(0)
    x = torch.randn(64, requires_grad=True)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 17)

    def block(t, scale):
        with tracker.fork():
            t = F.dropout(t, 0.5)
        return F.dropout(t, 0.5) * scale

    outputs = checkpoint(block, x, 3.0, get_rng_state_tracker=lambda: tracker)
    after = torch.rand(1)
    outputs.sum().backward()
    assert torch.equal(x.grad != 0, outputs != 0)
    assert x.grad.max() == 12.0
    torch.manual_seed(0)
    torch.randn(64)
    F.dropout(torch.ones(64), 0.5)
    assert torch.equal(torch.rand(1), after)


def test_named_random_states():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    with pytest.raises(RuntimeError):
        tracker.add("c", 1)
    with pytest.raises(RuntimeError):
        tracker.add("a", 3)
    saved = tracker.get_states()
    before = torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(1)
    with tracker.fork("a"):
        assert torch.rand(1) != first
    assert torch.equal(torch.get_rng_state(), before)
    tracker.set_states(saved)
    with tracker.fork("a"):
        assert torch.rand(1) == first
    with pytest.raises(KeyError), tracker.fork("c"):
        pass


def test_lists_of_tensors():
    tensors = [torch.tensor(3.0), torch.tensor([[4.0, 12.0]])]
    apply, overflow = optimizers.multi_tensor_applier, torch.zeros(1, dtype=torch.int)
    total, each = apply(optimizers.multi_tensor_l2norm, overflow, [tensors], True)
    close(total, torch.tensor([13.0]), 1e-6)
    close(each, torch.tensor([3.0, 160.0**0.5]), 1e-6)
    scale = torch.tensor([0.5])
    apply(optimizers.multi_tensor_scale_tensor, overflow, [tensors, tensors], scale)
    assert [tensor.tolist() for tensor in tensors] == [1.5, [[2.0, 6.0]]]
    assert overflow.item() == 0
    apply(optimizers.multi_tensor_scale, overflow, [[torch.tensor([1e39 / 1e-3])], [scale]], 1.0)
    assert overflow.item() == 1


def test_norm_of_many_elements():
    """The norm of a large tensor is as accurate as the kernel's, however it is divided."""
    whole = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1))
    exact = whole.double().square().sum().sqrt()
    for parts in (1, 2, 7):
        lists = [list(whole.tensor_split(parts))]
        total, _ = optimizers.multi_tensor_l2norm(1, torch.zeros(1), lists)
        close(total.double()[0], exact, 1e-7)


@pytest.mark.parametrize(("layout", "shapes"), [("TN", "oi ni"), ("NN", "oi no"), ("NT", "ni no")])
def test_matrix_products(layout, shapes):
    """Output, gradient of the input and of the weight, each from matrices as Megatron has them."""
    sizes = {"i": 3, "o": 5, "n": 4}
    first, second = (
        torch.randn([sizes[dim] for dim in shape]).bfloat16() for shape in shapes.split()
    )
    product = gemm.general_gemm(first, second, out_dtype=torch.float32, layout=layout)[0]
    left = second.double() if layout[1] == "N" else second.double().mT
    right = first.double() if layout[0] == "N" else first.double().mT
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), left @ right, rtol=1e-6, atol=1e-6)
    buffer = torch.zeros_like(product)
    found = gemm.general_gemm(first, second, out_dtype=torch.float32, layout=layout, out=buffer)
    assert found[0] is buffer
    assert buffer.equal(product)


def test_matrix_product_with_bias():
    """It is added before the result is rounded; what nobody asks for is refused."""
    weight, rows, bias = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([1.0, 2.0])
    assert gemm.general_gemm(weight, rows, bias=bias)[0].tolist() == [[4.0, 5.0]] * 4
    assert gemm.general_gemm(weight, rows, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    for unknown in ({"bias": bias, "grad": True}, {"accumulate": True}, {"gelu": True}):
        with pytest.raises(NotImplementedError, match="general_gemm: "):
            gemm.general_gemm(weight, rows, **unknown)
