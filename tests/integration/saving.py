# SPDX-License-Identifier: Apache-2.0
"""Train as launch/pretrain_gpt.py does; each rank writes what it has when Megatron saves.

The environment's ``TTRACE_TEST_SAVED`` is the folder for it; see test_stored.py.
"""

import dataclasses
import json
import os
import runpy
from pathlib import Path
from typing import Any

import megatron_ttrace

megatron_ttrace.enable()

from safetensors.torch import save_file  # noqa: E402

from megatron_ttrace.capture.state import bucketed, held_state  # noqa: E402
from megatron_ttrace.capture.step import TracedModel  # noqa: E402
from megatron_ttrace.mcore.checkpoints.names import stored_name, stored_names  # noqa: E402
from megatron_ttrace.mcore.groups import current_mesh  # noqa: E402
from megatron_ttrace.mcore.names import canonical_names, unwrap  # noqa: E402
from megatron_ttrace.trace import codec  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain_gpt.py"


def write(chunks: list[Any], optimizer: Any) -> None:
    """This rank's state, with its place in the whole model and in buckets."""
    from megatron.training import get_args

    args = get_args()
    mesh = current_mesh(args)
    offset = (args.num_experts or 0) // mesh.size("ep") * mesh.at("ep")
    modules = [canonical_names(unwrap(chunk), expert_offset=offset) for chunk in chunks]
    model = TracedModel(chunks, modules, optimizer, mesh)
    templates = stored_names(chunks)
    folder = Path(os.environ["TTRACE_TEST_SAVED"])
    names = {where.name: stored_name(templates[p], where.name) for p, where in model.places()}
    pieces = [dataclasses.replace(piece, name=names[piece.name]) for piece in bucketed(model)]
    tensors, lines = {}, []
    for number, held in enumerate(held_state(model)):
        owner = held.data if held.parameter is None else held.parameter
        if owner not in templates:
            continue
        tensors[str(number)] = held.data.detach().clone().contiguous()
        lines.append(
            {
                "tensor": str(number),
                "index": int(held.index),
                "name": stored_name(templates[owner], held.place.name),
                "boxes": [(b.logical, b.extent, b.local) for b in held.place.boxes(mesh)],
            }
        )
    save_file(tensors, folder / f"{mesh.rank}.safetensors")
    state = {"tensors": lines, "buckets": [codec.encode(piece) for piece in pieces]}
    (folder / f"{mesh.rank}.json").write_text(json.dumps(state))


def main() -> None:
    """Patch saving, and train."""
    import megatron.training.training as training

    save = training.save_checkpoint

    def saving(iteration: int, model: Any, optimizer: Any, *rest: Any, **more: Any) -> Any:
        write(model, optimizer)
        return save(iteration, model, optimizer, *rest, **more)

    training.save_checkpoint = saving
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
