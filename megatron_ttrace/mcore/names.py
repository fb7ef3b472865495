# SPDX-License-Identifier: Apache-2.0
"""Canonical names: what a module or parameter is called in the whole model.

A pipeline stage numbers its layers from 0. Megatron keeps the global number (from 1, over all
pipeline and virtual-pipeline stages) in ``layer_number``
(megatron/core/transformer/transformer_layer.py). Experts are numbered per expert-parallel rank
(megatron/core/transformer/moe/experts.py).
"""

import dataclasses
import re

import torch

from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.trace.modules import around, is_within
from megatron_ttrace.trace.records import ROOT

EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"
HEAD_WEIGHT = "output_layer.weight"

_GROUPED_WEIGHT = re.compile(r"(weight|bias)(\d+)")


@dataclasses.dataclass(frozen=True)
class Names:
    """Canonical names of one model chunk's modules and parameters.

    Attributes:
        modules, parameters, buffers: by canonical name.
        spans: modules whose inputs and outputs depend on which layers this rank holds (the model, a
            block of layers). Their children are compared instead.
        layers: modules that are numbered over all pipeline stages.
        unused: parameters that no forward pass reads; they are not in ``parameters``.
        inputs: names of what the model is given, by position; filled when it runs.
    """

    modules: dict[str, torch.nn.Module]
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    spans: frozenset[str]
    layers: frozenset[str] = frozenset()
    unused: tuple[str, ...] = ()
    inputs: list[str] = dataclasses.field(default_factory=list, compare=False)


_WRAPPERS = {"_BaseDataParallel", "Float16Module", "MegatronFSDP"}
"""Classes, or bases of classes, that hold the model as ``module``."""


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside Megatron's DDP and mixed-precision wrappers.

    torch's FSDP2 gives a module that it divides a class of its own, derived from the old one.
    """
    while any(base.__name__ in _WRAPPERS for base in type(chunk).__mro__):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def canonical_names(chunk: torch.nn.Module, *, expert_offset: int = 0) -> Names:
    """Name everything in an unwrapped chunk.

    ``expert_offset`` is the global number of this expert-parallel rank's first expert.
    """
    modules: dict[str, torch.nn.Module] = {}
    parameters: dict[str, torch.nn.Parameter] = {}
    unused: list[str] = []
    buffers: dict[str, torch.Tensor] = {}
    spans = {""}
    numbered: set[str] = set()
    beside: dict[torch.nn.Module, dict[str, str]] = {}
    canonical = {"": ""}
    for path, module in chunk.named_modules():
        prefix = canonical[path]
        # TorchScript's have no hooks: what contains them is compared.
        if not isinstance(module, torch.jit.ScriptModule):
            modules[prefix or ROOT] = module
        layers = _numbered_layers(module)
        beside.update(_beside_layers(module))
        first = expert_offset if _are_experts(prefix, module, expert_offset) else 0
        # A chunk without layers has the embedding or the loss only
        # (--account-for-embedding-in-pipeline-split).
        if layers or (prefix.endswith(".layers") and not any(module.named_children())):
            spans |= _around(prefix.rpartition(".")[0])
        for local, _ in module.named_children():
            leaf = layers.get(local) or beside.get(module, {}).get(local)
            if leaf is None:
                leaf = str(int(local) + first) if first and local.isdigit() else local
            # What follows this sign tells the runs of a module apart.
            inner = _join(prefix, leaf.replace("#", "%23"))
            if local in layers:
                numbered.add(inner)
            # A model in another one may have the name of the whole.
            canonical[_join(path, local)] = f"{ROOT}_" if inner == ROOT else inner
        for leaf, parameter in module.named_parameters(recurse=False):
            number = beside.get(module, {}).get(leaf)
            name = _join(prefix, number or _expert_leaf(prefix, leaf, expert_offset))
            if name == HEAD_WEIGHT and _head_is_unused(chunk):
                unused.append(name)
                continue
            parameters[_tied_name(name, raw(parameter))] = parameter
        for leaf, buffer in module.named_buffers(recurse=False):
            if buffer is not None and (prefix or ROOT) in modules:
                buffers[_join(prefix, leaf)] = buffer
    return Names(
        modules=modules,
        parameters=parameters,
        buffers=buffers,
        spans=frozenset(spans),
        layers=frozenset(numbered),
        unused=tuple(unused),
    )


def called_in(layer: str, name: str) -> str:
    """The name of a module's runs in a layer, or in the model where no layer calls it.

    What layers call outside of themselves may run in earlier pipeline stages, too: it is named for
    who calls it, not numbered. With multi-token prediction a later stage looks up the shifted
    tokens in an embedding of its own.
    """
    return name if is_within(name, layer) else f"{name}#{layer.replace('.', '/')}"


def stage_flag(chunk: torch.nn.Module, name: str) -> bool:
    """A flag of the model: a fork may have it inside another one that does not say so."""
    return next((bool(vars(m)[name]) for m in chunk.modules() if name in vars(m)), True)


def _around(block: str) -> set[str]:
    """A block of layers, and the models that it is in; in a layer only itself."""
    in_layer = any(map(str.isdigit, block.split(".")))
    return {block} if in_layer else {block, *around(block), ""}


def _head_is_unused(chunk: torch.nn.Module) -> bool:
    """Whether the head has a weight of its own that is never read.

    On a later stage with multi-token prediction the head uses the tied embedding
    (``shared_embedding_or_output_weight`` in
    megatron/core/models/common/language_module/language_module.py), but it allocates a weight on
    every stage except the first (megatron/core/models/gpt/gpt_model.py).
    """
    tied = getattr(chunk, "share_embeddings_and_output_weights", False)
    return bool(
        tied and getattr(chunk, "mtp_process", False) and not stage_flag(chunk, "pre_process")
    )


def _numbered_layers(module: torch.nn.Module) -> dict[str, str]:
    """Global numbers of the layers in a list, by local ones; none for a list of other modules.

    Parts of a layer have its number, too: several in a list would have one name.
    """
    layers = {
        leaf: str(number)
        for leaf, child in module.named_children()
        if leaf.isdigit() and (number := _layer_of(child)) is not None
    }
    leaves = [layers.get(leaf, leaf) for leaf, _ in module.named_children()]
    return layers if len({*leaves}) == len(leaves) else {}


def _layer_of(module: torch.nn.Module) -> int | None:
    """The global number, from 0, of a layer, which a fork may have wrapped in other modules.

    Layers in the style of transformers have it as ``layer_idx``.
    """
    for name, first in (("layer_number", 1), ("layer_idx", 0)):
        if isinstance(number := getattr(module, name, None), int):
            return number - first
    children = [*module.children()]
    return _layer_of(children[0]) if len(children) == 1 else None


def _beside_layers(module: torch.nn.Module) -> dict[torch.nn.Module, dict[str, str]]:
    """Lists in a module that a fork fills with one module for each layer of the stage.

    The layers, in a single list in the module, say which numbers these modules have.
    """
    kinds = torch.nn.ModuleList, torch.nn.ParameterList
    lists = [child for child in module.children() if isinstance(child, kinds)]
    if not lists:
        return {}
    layers = [numbers for each in module.modules() if (numbers := _numbered_layers(each))]
    return {
        each: numbers
        for each in lists
        for numbers in (layers if len(layers) == 1 else ())
        if [name for name, _ in (*each.named_children(), *each._parameters.items())] == [*numbers]
    }


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def are_own_experts(name: str, module: torch.nn.Module) -> bool:
    """Whether a module is a fork's own list of experts."""
    return isinstance(module, torch.nn.ModuleList) and name.endswith(".experts")


def _are_experts(prefix: str, module: torch.nn.Module, expert_offset: int) -> bool:
    """Whether ``0`` in a list is the rank's first expert: in a fork's own, if no rank has all."""
    own = are_own_experts(prefix, module) and len(module) <= expert_offset  # type: ignore[arg-type]
    return own or prefix.endswith("local_experts")


def _expert_leaf(prefix: str, leaf: str, expert_offset: int) -> str:
    """``weight0`` of a grouped linear in experts is the weight of the rank's first expert."""
    match = _GROUPED_WEIGHT.fullmatch(leaf)
    if match and is_within_experts(prefix):
        return f"{match[1]}{int(match[2]) + expert_offset}"
    return leaf


def raw(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter that Megatron's layers created and marked, if FSDP replaced it."""
    return getattr(parameter, "orig_param", parameter)


def _tied_name(name: str, parameter: torch.nn.Parameter) -> str:
    """The last stage's copy of a tied embedding is a replica of the embedding.

    Megatron marks it ``shared_embedding`` (``setup_embeddings_and_output_layer`` in
    megatron/core/models/common/language_module/language_module.py). A model of images has a
    language model in it.
    """
    if name.endswith(HEAD_WEIGHT) and getattr(parameter, "shared_embedding", False):
        return name.removesuffix(HEAD_WEIGHT) + EMBEDDING_WEIGHT
    return name
