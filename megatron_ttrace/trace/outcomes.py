# SPDX-License-Identifier: Apache-2.0
"""Why a tensor has its outcome, why it is a culprit, and what a check does not cover."""

import dataclasses
from enum import StrEnum


class Reason(StrEnum):
    """Why a tensor has its outcome, if the outcome leaves it open; ``note`` has the details.

    report/messages.toml has them in words.
    """

    # Of tensors that are not checked, though they may fail.
    BLIND = "blind"
    NONDETERMINISTIC = "non-deterministic"
    UNDEFINED = "undefined"
    DISPATCHED = "dispatched"
    OWN_TOKENS = "own tokens"
    OWN_SHARD = "own shard"
    INITIAL_VALUES = "initial values"
    OTHER_START = "other start"
    ONE_RUN = "one run"
    NO_COUNTERPART = "no counterpart"
    PADDED = "padded vocabulary"
    KNOWN = "known difference"
    COPY = "copy"
    UNTRAINED = "untrained"
    IGNORED = "ignored"
    PIECES = "pieces"
    OWN_MEAN = "own mean"
    # Of failures.
    TWIN = "twin"
    """Initial values that are bitwise equal to those of another part or parameter."""
    RANDOM_STATE = "random state"
    """Copies of initial values that differ, each with the reference's distribution."""
    COUNTED_TWICE = "counted twice"
    NEVER_COUNTED = "never counted"
    OTHER_NORM = "other norm"


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
    USED = "used"
    MODEL_INPUT = "model_input"
    ABSENT = "absent"
    ABSENT_MODULE = "absent_module"
    ANOTHER_KIND = "another_kind"
    NOT_CALLED = "not_called"
    MORE_MICROBATCHES = "more_microbatches"
    FEWER_MICROBATCHES = "fewer_microbatches"
    REPEATED_MICROBATCHES = "repeated_microbatches"
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
