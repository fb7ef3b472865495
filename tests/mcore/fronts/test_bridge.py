# SPDX-License-Identifier: Apache-2.0
"""The front of Megatron-Bridge, without it."""

from types import SimpleNamespace

from megatron_ttrace.mcore.fronts.bridge import Bridge


def test_packed_samples() -> None:
    """Their borders are padded like the samples."""
    packing = SimpleNamespace(pad_cu_seqlens=False)
    dataset = SimpleNamespace(
        dataloader_type="batch",
        dataset_kwargs={"pad_to_max_length": True},
        enable_offline_packing=True,
        offline_packing_specs=packing,
    )
    model = SimpleNamespace(context_parallel_size=1)
    checkpoint = SimpleNamespace(pretrained_checkpoint=None)
    cfg = SimpleNamespace(
        dataset=dataset, model=model, checkpoint=checkpoint, peft=None, data_parallel_size=2
    )
    Bridge(cfg).update(lambda cfg: None, reference=False, exits=True)
    assert packing.pad_cu_seqlens is True
