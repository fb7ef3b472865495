# SPDX-License-Identifier: Apache-2.0
"""The table of jobs and pairs."""

from tests.assay.checkpoints.jobs import Layout, jobs, pairs


def test_there_are_enough_pairs():
    """At least 60 of them, half of which change the layout."""
    found = list(pairs())
    assert len(found) >= 60
    assert sum(layout != job.layout for job, layout in found) >= 40


def test_every_word_is_known():
    """What remains are flags of Megatron and their values."""
    for job in jobs().values():
        words = [*job.base, *job.layout.flags, *(w for one in job.into for w in one.flags)]
        assert [word for word in words if word in ("tp2", "zero", "async", "deep", "uneven")] == []
        assert any(word.startswith("--") for word in words)


def test_a_changed_layout():
    """Sizes that are gone become 1; nothing is added in the same layout."""
    before = Layout.of("2 tp2 sp")
    assert before.changed(before) == ()
    assert Layout.of("2 pp2").changed(before) == (
        *("--tensor-model-parallel-size", "1"),
        *("--pipeline-model-parallel-size", "2"),
    )
    assert Layout.of("1").changed(Layout.of("2")) == ()


def test_what_mechanisms_may_need():
    """Words are derived from model, dtype and layout."""
    words = {name: job.words for name, job in jobs().items()}
    assert {"tp", "deep", "torch_dist", "decay"} <= words["tp"]
    assert "main" not in words["tp"]
    assert {"main", "gated"} <= words["tp-bf16"]
    assert {"ep", "experts", "bias", "gated", "main"} <= words["experts-deep"]
    assert "torch_dist" not in words["torch"] | words["fsdp"]
    assert "deep" not in words["sinks"]
