# SPDX-License-Identifier: Apache-2.0
"""Why a tensor has its outcome, why it is a culprit, and what a check does not cover."""

import dataclasses
from enum import StrEnum


class Reason(StrEnum):
    """Why a tensor has its outcome, if the outcome leaves it open; ``note`` has the details."""

    BLIND = "blind"
    """Unchecked: rounding alone moves it so far that a bug would not show."""
    NONDETERMINISTIC = "non-deterministic"
    """Unchecked: the reference itself moves it as far, without any perturbation."""
    UNDEFINED = "undefined"
    """Unchecked: it holds NaN in both runs."""
    DISPATCHED = "dispatched"
    """Unchecked: its rows went through a token dispatcher that cannot be followed."""
    OWN_TOKENS = "own tokens"
    """Unchecked: a choice that depends on all tokens that a rank has, here a part of them."""
    OWN_SHARD = "own shard"
    """Unchecked: an update that depends on a rank's whole shard of a matrix."""
    INITIAL_VALUES = "initial values"
    """Unchecked: there is no distribution to compare."""
    OTHER_START = "other start"
    """Unchecked: it fails, but the step began from other parameters than the reference's."""
    ONE_RUN = "one run"
    """Unchecked: only one of two runs has such tensors."""
    NO_COUNTERPART = "no counterpart"
    """Unchecked: another implementation of the model has no such tensor."""
    PADDED = "padded vocabulary"
    """Unchecked: it fails, and follows from losses over vocabularies with other paddings."""
    KNOWN = "known difference"
    """Unchecked: it fails, and is on the list of known differences between the two runs."""
    COPY = "copy"
    """Unchecked: it fails, and is the gradient of a copy of a tensor whose gradient passes."""
    UNTRAINED = "untrained"
    """Unchecked: a gradient that the reference does not compute, as nothing trained needs it."""
    TWIN = "twin"
    """Initial values that are bitwise equal to those of another part or parameter."""
    RANDOM_STATE = "random state"
    """Copies of initial values that differ, each with the reference's distribution."""
    COUNTED_TWICE = "counted twice"
    """Elements are in a norm, a count or an update more than once."""
    NEVER_COUNTED = "never counted"
    """Elements are missing from a norm, a count or an update."""
    OTHER_NORM = "other norm"
    """Gradients are clipped by the norm of other parameters than in the reference."""


class Unexercised(StrEnum):
    """A feature that the job requests and that had no effect in the traced steps."""

    ONE_RANK = "one_rank"
    SCHEDULE = "schedule"
    DIFFERENT_DATA = "different_data"
    SHARDED_OPTIMIZER = "sharded_optimizer"
    BUCKETS = "buckets"
    DROPOUT = "dropout"
    RANDOM_ROUTING = "random_routing"
    MLP_CHUNKS = "mlp_chunks"
    FP8_WEIGHTS = "fp8_weights"
    SWITCHED_OFF = "switched_off"
    OVERFLOW = "overflow"
    BALANCING_LOSS = "balancing_loss"
    LOSS_MASK = "loss_mask"
    POSITION_RESET = "position_reset"
    ATTENTION_RESET = "attention_reset"
    TOKEN_WEIGHTS = "token_weights"  # noqa: S105 - tokens of text
    WINDOW = "window"
    SPARSE_ATTENTION = "sparse_attention"
    RAMP_UP = "ramp_up"
    IDLE_EXPERTS = "idle_experts"
    CAPACITY = "capacity"
    CLIP = "clip"
    GRADIENTS = "gradients"
    UPDATE = "update"
    UNCHECKED = "unchecked"


@dataclasses.dataclass(frozen=True, slots=True)
class NotExercised:
    """A feature that passes whether it is right or wrong.

    ``value`` is what was measured of it and ``limit`` what that is to be compared with, where there
    are such numbers (docs/flags-and-files.md); ``names`` are the modules or parameters concerned.
    """

    what: Unexercised
    value: float | None = None
    limit: float | None = None
    names: tuple[str, ...] = ()


class Grounds(StrEnum):
    """Why a tensor is taken for the origin of the error."""

    INITIAL = "initial"
    LOADED = "loaded"
    LOADED_NEITHER = "loaded_neither"
    LOADED_ONE_DEVICE = "loaded_one_device"
    LOADED_ALIKE = "loaded_alike"
    LOADED_STORED = "loaded_stored"
    LOADED_MAIN = "loaded_main"
    SAVED_MAIN = "saved_main"
    LOADED_AGREED = "loaded_agreed"
    LOADED_NUMBER = "loaded_number"
    START = "start"
    MODEL_INPUT = "model_input"
    ABSENT = "absent"
    ABSENT_MODULE = "absent_module"
    ANOTHER_KIND = "another_kind"
    NOT_CALLED = "not_called"
    MORE_MICROBATCHES = "more_microbatches"
    FEWER_MICROBATCHES = "fewer_microbatches"
    OUTPUT = "output"
    OUTPUT_WITHOUT_INPUTS = "output_without_inputs"
    MASK = "mask"
    PRECISION = "precision"
    BETWEEN_MODULES = "between_modules"
    LOSS = "loss"
    FIRST_ABSENT_GRADIENT = "first_absent_gradient"
    JUMP = "jump"
    GRAD_INPUT = "grad_input"
    GRAD_INPUT_WITHOUT_GRAD_OUTPUTS = "grad_input_without_grad_outputs"
    WITHIN = "within"
    FIRST_GRADIENT = "first_gradient"
    MAIN_GRAD = "main_grad"
    NO_MAIN_GRAD = "no_main_grad"
    REDUCED = "reduced"
    STEPPED = "stepped"
    COUNTED = "counted"
    GRAD_NORM = "grad_norm"
    METRIC = "metric"
    LEFT_OVER = "left_over"
    NO_OPTIMIZER_STATE = "no_optimizer_state"
    UPDATE = "update"
    BUFFER = "buffer"
    ISOLATED = "isolated"
    FIRST_FAILURE = "first_failure"
