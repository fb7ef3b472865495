# SPDX-License-Identifier: Apache-2.0
"""A program without a GPU that checks an offloading optimizer; see test_offloaded.py."""

import types

import megatron_ttrace

megatron_ttrace.enable()

import torch  # noqa: E402
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # noqa: E402

from megatron_ttrace.cpu import offload  # noqa: E402
from megatron_ttrace.mcore.optimizer import Snapshot, owned_by, reload_offloaded  # noqa: E402


def made(dtype):
    """Two parameters in an optimizer that offloads one, as DistributedOptimizer holds it."""
    offload.keep_apart()
    offload.keep_apart()
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4, dtype=dtype)) for _ in "ab"])
    inner = HybridDeviceOptimizer(
        [{"params": list(model)}],
        offload_fraction=0.5,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        lr=0.1,
    )
    leaf = types.SimpleNamespace(
        optimizer=inner,
        model_param_group_index_map={part: (0, at) for at, part in enumerate(model)},
        model_fp32_groups=[list(model) if dtype == torch.float32 else []],
        model_float16_groups=[[] if dtype == torch.float32 else list(model)],
        _get_model_param_range_map=lambda _: {"param": types.SimpleNamespace(start=0, end=4)},
    )
    return model, leaf


def steps():
    """The assertions."""
    model, leaf = made(torch.bfloat16)
    owned = owned_by(leaf)
    assert [type(part.inner).__name__ for part in owned.values()] == ["AdamW", "AdamW"]
    assert len({id(part.inner) for part in owned.values()}) == 2
    assert all(part.main.dtype == torch.float32 for part in owned.values())
    snapshot = Snapshot([torch.nn.Module()], leaf)
    results = []
    for _ in range(2):
        for parameter in model:
            parameter.decoupled_grad = torch.arange(1.0, 5.0)
        leaf.optimizer.step()
        after = owned_by(leaf)
        assert all("exp_avg" in part.state for part in after.values())
        results.append([part.weights.clone() for part in after.values()])
        snapshot.restore()
        assert all((part.weights == 1).all() and not part.state for part in owned_by(leaf).values())
        assert all((parameter == 1).all() for parameter in model)
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))
    assert (torch.stack(results[0]) < 1).all()
    # Megatron's own reload leaves out copies of float32 parameters.
    model, leaf = made(torch.float32)
    for parameter in model:
        parameter.data.fill_(7.0)
    leaf.optimizer.update_fp32_param_by_new_param()
    copies = [part.weights for part in owned_by(leaf).values()]
    assert not all((part == 7).all() for part in copies)
    reload_offloaded(leaf)
    assert all((part == 7).all() for part in copies)


if __name__ == "__main__":
    steps()
