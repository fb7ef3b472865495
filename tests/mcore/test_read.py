# SPDX-License-Identifier: Apache-2.0
"""What Megatron read from a checkpoint, on state dicts made by hand."""

from types import SimpleNamespace
from typing import Any

import torch

from megatron_ttrace.capture.state import read_numbers
from megatron_ttrace.mcore.checkpoints.read import Reading

RANDOM = [{"torch_rng_state": torch.ones(2)}]


def half(count: int) -> tuple[SimpleNamespace, dict[str, Any]]:
    """An optimizer with main weights, and a state dict of it with other values."""
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(count)]
    mains = [parameter.detach().float() for parameter in parameters]
    groups = [{"params": [main]} for main in mains]
    leaf = SimpleNamespace(
        optimizer=torch.optim.Adam(groups),
        float16_groups=[[parameter] for parameter in parameters],
        fp32_from_float16_groups=[[main] for main in mains],
        fp32_from_fp32_groups=[[] for _ in parameters],
    )
    state = {
        "optimizer": {
            "state": {n: {"exp_avg": torch.full((2,), n + 0.5), "step": 3} for n in range(count)},
            "param_groups": [{"params": [n], "lr": n + 1.0} for n in range(count)],
        },
        "grad_scaler": {"scale": torch.tensor([8.0])},
        "fp32_from_fp16_params": [[torch.full((2,), float(n))] for n in range(count)],
    }
    return leaf, state


def read(**state: Any) -> Reading:
    """All of it is literal."""
    reading = Reading()
    reading.keep(state, is_literal=True)
    return reading


def test_a_model() -> None:
    """By chunk and name; what has another shape is not this one's."""
    chunks = [torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(3)]
    first, second = ({"weight": torch.full((2,), value)} for value in (5.0, 6.0))
    first["running_mean"] = torch.full((2,), 7.0)
    values = read(model0=first, model1=second).of_model(chunks)
    assert set(values) == {chunks[0].weight, chunks[0].running_mean}
    assert values[chunks[0].weight].tolist() == [5.0, 5.0]


def test_optimizers() -> None:
    """Main weights and state by their number, of each optimizer in a chain; and their numbers."""
    (first_leaf, first_state), (second_leaf, second_state) = half(2), half(1)
    chain = SimpleNamespace(chained_optimizers=[first_leaf, second_leaf])
    reading = read(optimizer=[first_state, second_state], iteration=3)
    values = reading.of_optimizer(chain)
    assert len(values) == 3
    second = values[first_leaf.float16_groups[1][0]]
    assert second.main is not None
    assert second.main.tolist() == [1.0, 1.0]
    assert second.state["exp_avg"].tolist() == [1.5, 1.5]
    assert [*second.moments] == ["exp_avg", "exp_avg_sq"]
    numbers = read_numbers(chain, reading)
    assert (numbers["iteration"], numbers["loss_scale"]) == (3.0, 8.0)
    assert {value for name, value in numbers.items() if name.endswith(".step")} == {3.0}
    assert not read(optimizer=first_state).of_optimizer(chain)


def test_a_copy() -> None:
    """Loading may go on with the tensors that were read."""
    leaf, state = half(1)
    reading = read(optimizer=state)
    state["optimizer"]["state"][0]["exp_avg"].zero_()
    values = reading.of_optimizer(leaf)[leaf.float16_groups[0][0]]
    assert values.state["exp_avg"].tolist() == [0.5, 0.5]


def test_buckets() -> None:
    """A buffer of two buckets without the ends by which these are padded."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (3,), (2,))]
    buckets = [
        SimpleNamespace(
            param_to_index={parameters[0]: (0, 4), parameters[1]: (5, 8)}, numel_unpadded=8
        ),
        SimpleNamespace(param_to_index={parameters[2]: (0, 2)}, numel_unpadded=2),
    ]
    leaf = SimpleNamespace(
        optimizer=torch.optim.Adam(parameters),
        buffers=[SimpleNamespace(buckets=buckets)],
        gbuf_ranges=[{torch.float32: []}],
    )
    values = {"param": torch.arange(10.0), "exp_avg": -torch.arange(10.0), "numel_unpadded": 10}
    reading = Reading()
    reading.keep_buckets(leaf, {0: {torch.float32: values}})
    values = reading.of_optimizer(leaf)
    mains = [values[parameter].main for parameter in parameters]
    assert [main.tolist() for main in mains if main is not None] == [
        [[0.0, 1.0], [2.0, 3.0]],
        [5.0, 6.0, 7.0],
        [8.0, 9.0],
    ]
    assert values[parameters[2]].state["exp_avg"].tolist() == [-8.0, -9.0]


def test_random_states() -> None:
    """All that is literal in other formats; Megatron-FSDP's are by pipeline and tensor rank."""
    reading = Reading()
    reading.keep({"rng_state": RANDOM, "iteration": 3, "model": {}}, is_literal=False)
    assert (set(reading.state), reading.is_literal) == ({"rng_state"}, False)
    values = reading.random("(0, 0)", 1)
    assert values is not None
    assert torch.equal(values["torch_rng_state"], torch.ones(2))
    reading = read(rng_state={"(0, 1)": [{"a": 1}, {"a": 2}]})
    assert reading.random("(0, 1)", 1) == {"a": 2}
    assert reading.random("(0, 0)", 0) is None
