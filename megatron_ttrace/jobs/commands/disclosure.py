# SPDX-License-Identifier: Apache-2.0
"""What of a command, of the environment and of Megatron's arguments may be in a file.

A list of what is allowed, because no pattern knows all secrets: a value is shown if its flag,
option or variable is known to be harmless, and is :data:`HIDDEN` otherwise. In values that are
shown, credentials in addresses are hidden.
"""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_ttrace.jobs.settings import CHECK, FLAGS
from megatron_ttrace.mcore.options.decisions import option_of
from megatron_ttrace.mcore.options.roles import ROLES, VALUES, Role
from megatron_ttrace.trace import errors

HIDDEN = "***"

_SHOWN_ROLES = frozenset(
    {
        *(Role.CODE, Role.DATA, Role.SIZE, Role.AXIS, Role.LAYOUT, Role.TRANSPORT, Role.LENGTH),
        *(Role.INPUT, Role.CHECKPOINT, Role.OPERATION, Role.REFUSED),
    }
)
_FREE_TEXT = frozenset(
    """
    app_tag_run_name app_tag_run_version chat_template fim_eod_token fim_middle_token fim_pad_token
    fim_prefix_token fim_suffix_token langrl_env_config one_logger_project one_logger_run_name
    otel_service_name special_tokens tiktoken_pattern
    wandb_entity wandb_exp_name wandb_project
    """.split()
)
"""Options whose value can be anything."""

_OUR_FLAGS = frozenset(
    """
    --against --allow-unchecked --checkout --directory --good --into --known --max-ranks --recipe
    --seconds --steps --timeout
    """.split()
) | {flag.name for flag in FLAGS.values() if not flag.is_switch}
_LAUNCHER_VALUES = frozenset(
    """
    --nproc-per-node --nproc_per_node --nnodes --node-rank --node_rank --master-addr --master_addr
    --master-port --master_port --rdzv-backend --rdzv_backend --max-restarts --max_restarts
    --local-ranks-filter --log-dir --log_dir --redirects --tee -m -n -N -np --ntasks --nodes
    --ntasks-per-node --gpus-per-node --cpus-per-task --num_processes --num_machines -c
    """.split()
)
"""Flags of launchers, Python and shells with one value."""
_SWITCHES = frozenset(
    """
    -- --standalone --no-python --no_python --run-path -u -O -B -I -P -s -S -E -l -i --no-fork
    --quiet --json --shrink --blame --once
    """.split()
) | {CHECK.name, *(flag.name for flag in FLAGS.values() if flag.is_switch)}
_OF_COMMANDS = frozenset({"-c", "--against", "--into", "--ttrace-reference-args"})
"""Flags whose value is a command itself, or arguments."""
_PROGRAM = re.compile(
    r"([\w./-]*/)?(ttrace|torchrun|python[\d.]*|srun|mpirun|env|bash|sh|accelerate|timeout|nohup)"
    r"|cd|exec|export|set"
)
_SUBCOMMANDS = frozenset(
    """
    check record diff compare report shrink recipes bisect hunt blame checkpoint resume ci clean
    doctor patch demo data eval bugs matrix mutants nightly plant run
    """.split()
)
_SCRIPT = re.compile(r"[\w./-]+\.(py|sh|slurm|sbatch)")
_SEPARATORS = ";&|\n"
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FIELD = re.compile(r"(\+{0,2}([a-z_]+)\.(\w+))=(.*)", re.DOTALL)
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*://)(?:[^\s]*@)?([^\s?#]*)([?#][^\s]*)?")

_VARIABLES = frozenset(
    """
    ATEN_CPU_CAPABILITY CUBLASLT_WORKSPACE_SIZE CUBLAS_WORKSPACE_CONFIG CUDA_CACHE_DISABLE
    CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_HOME CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
    CUDA_PATH CUDA_VISIBLE_DEVICES CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT CUDNN_LOGLEVEL_DBG
    DNNL_MAX_CPU_ISA DNNL_VERBOSE FLASH_ATTENTION_DETERMINISTIC GLOO_SOCKET_IFNAME LD_PRELOAD
    MKL_CBWR MKL_DYNAMIC MKL_NUM_THREADS NCCL_ALGO NCCL_ASYNC_ERROR_HANDLING
    NCCL_AVOID_RECORD_STREAMS NCCL_BUFFSIZE
    NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS
    NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_QPS_PER_CONNECTION NCCL_IB_SL NCCL_IB_TC
    NCCL_IB_TIMEOUT NCCL_LAUNCH_MODE NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS
    NCCL_MIN_NCHANNELS NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NTHREADS NCCL_NVLS_ENABLE NCCL_P2P_DISABLE
    NCCL_P2P_LEVEL NCCL_P2P_NET_CHUNKSIZE NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME
    NCCL_TIMEOUT NCCL_TOPO_FILE NVIDIA_TF32_OVERRIDE NVTE_ALLOW_NONDETERMINISTIC_ALGO
    NVTE_APPLY_QK_LAYER_SCALING NVTE_BATCH_MHA_P2P_COMM NVTE_BIAS_GELU_NVFUSION NVTE_CPU_OFFLOAD_V1
    NVTE_DEBUG NVTE_DEBUG_LEVEL NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_FUSED_ATTN_BACKEND
    NVTE_FUSED_ATTN_USE_FAv2_BWD NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_BWD_LAYERNORM_SM_MARGIN
    NVTE_NORM_BWD_USE_CUDNN NVTE_NORM_FWD_USE_CUDNN NVTE_TORCH_COMPILE NVTE_UNFUSED_ATTN
    NVTE_USE_CUTLASS_GROUPED_GEMM OMP_DYNAMIC OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES
    ONEDNN_MAX_CPU_ISA ONEDNN_VERBOSE PYTHONHASHSEED PYTHONPATH PYTHONSAFEPATH
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_JIT PYTORCH_NO_CUDA_MEMORY_CACHING
    TORCHDYNAMO_DISABLE TORCHINDUCTOR_CACHE_DIR TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    TORCH_BLAS_PREFER_CUBLASLT TORCH_COMPILE_DISABLE TORCH_CUDA_ARCH_LIST
    TORCH_CUDNN_V8_API_DISABLED
    TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT TORCH_DISTRIBUTED_DEBUG TORCH_LOGS
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_HIGH_PRIORITY TRITON_CACHE_DIR TRITON_INTERPRET TTRACE_CACHE TTRACE_CACHE_SHARED
    TTRACE_DEBUG TTRACE_RUN_ID TTRACE_TE_VERSION UCX_NET_DEVICES UCX_TLS
    """.split()
)
"""Variables whose values are numbers, names of devices and algorithms, or paths."""


def is_shown(option: str | None) -> bool:
    """Whether an option of Megatron's may be shown with its value; ``None`` is an unknown one."""
    return option is not None and ROLES.get(option) in _SHOWN_ROLES and option not in _FREE_TEXT


def text(value: str) -> str:
    """A value that may be shown, without credentials and queries in its addresses."""

    def hide(match: re.Match[str]) -> str:
        scheme, place, query = match[1], match[2], match[3]
        user = f"{HIDDEN}@" if "@" in match[0] else ""
        return f"{scheme}{user}{place}{f'{query[0]}{HIDDEN}' if query else ''}"

    return _ADDRESS.sub(hide, value)


_NONE: Mapping[str, int] = MappingProxyType({})


def withhold(words: Sequence[str], known: Mapping[str, int] = _NONE) -> None:
    """Keep what must not be shown of a command out of the errors of this process.

    Words before the script that belong to no flag are shown there. ``known``: further flags, and
    how many values they have.
    """
    errors.withhold(_withheld(words, known))


def _withheld(words: Sequence[str], known: Mapping[str, int] = _NONE) -> Iterator[str]:
    for word, shown in zip(words, _shown(words, lambda word: word, known), strict=True):
        before, hides, _ = shown.partition(HIDDEN)
        hidden = word.removeprefix(before)
        if hides and shown != word and not os.path.exists(hidden):
            yield hidden
        # A line break among the words of a text is a separator, and a word.
        if re.search(r"\s", word) and not _is_separator(word):
            with contextlib.suppress(ValueError):
                yield from _withheld(_split(word))


def command(words: Sequence[str]) -> list[str]:
    """The words of a command, with :data:`HIDDEN` for values that may be secret.

    Flags stay, as do the launcher, the script, and assigned variables by name. Behind the script
    only values of known options are shown, as many as the option takes. A quoted command within a
    command is treated alike.
    """
    return _shown(words, _positional)


def _shown(
    words: Sequence[str], positional: Callable[[str], str], known: Mapping[str, int] = _NONE
) -> list[str]:
    """See :func:`command`; ``positional`` decides on words before the script."""
    shown: list[str] = []
    flag = ""
    remaining: int | None = 0  # values of the flag that may follow; None: any word may be one
    in_script = is_over = False
    for word in words:
        if is_over:
            shown.append(HIDDEN)
        elif _is_separator(word):
            shown.append(word)
            remaining = 0
        elif word == "--" or _FLAG.fullmatch(word.partition("=")[0]):
            is_over = in_script and word == "--"
            flag, equals, value = word.partition("=")
            remaining = known.get(flag, _values_of(flag, in_script=in_script))
            if remaining is None and not flag.startswith("--") and flag[2:]:
                # "-n4", "-pSECRET"
                is_known = not in_script and flag[:2] in _LAUNCHER_VALUES - _OF_COMMANDS
                glued = _value(flag[:2], flag[2:]) if is_known else HIDDEN
                flag, remaining = f"{flag[:2]}{glued}", 0 if is_known else None
            shown.append(
                f"{flag}={_value(flag, value) if remaining else HIDDEN}" if equals else flag
            )
            remaining = 0 if equals and remaining else remaining
        elif remaining:
            shown.append(_value(flag, word))
            remaining -= 1
        elif not in_script and (match := _ASSIGNMENT.fullmatch(word)):
            allowed = remaining == 0 and match[1] in _VARIABLES
            shown.append(f"{match[1]}={text(match[2]) if allowed else HIDDEN}")
        elif (remaining == 0 and _PROGRAM.fullmatch(word)) or (not in_script and _is_place(word)):
            shown.append(word)
            in_script = _SCRIPT.fullmatch(word) is not None
            remaining = 0
        elif in_script:
            shown.append(_override(word) if remaining == 0 else HIDDEN)
        else:
            shown.append(HIDDEN if remaining is None else positional(word))
    return shown


def _is_separator(word: str) -> bool:
    """Whether it ends a command in a shell's text: ``;``, ``&&``, a line's end."""
    return bool(word) and not word.strip(_SEPARATORS)


def _values_of(flag: str, *, in_script: bool) -> int | None:
    """How many words after a flag may be shown; ``None`` for a flag that is not known."""
    if flag in _SWITCHES:
        return 0
    if flag in _OUR_FLAGS or (flag in _LAUNCHER_VALUES and not in_script):
        return 1
    option = option_of(flag) if flag.startswith("--") else None
    return VALUES[option] if option is not None and is_shown(option) else None


def _value(flag: str, value: str) -> str:
    if value.startswith("-") and not (_NUMBER.fullmatch(value) or flag in _OF_COMMANDS):
        return HIDDEN
    if flag in _OF_COMMANDS and re.search(r"[\s=-]", value):
        return _nested(value)
    if not flag.startswith("--") and flag != "-m" and not _NUMBER.fullmatch(value):
        return HIDDEN
    return text(value)


def _positional(word: str) -> str:
    """A word before the script that is neither a value nor a program or file."""
    if word in _SUBCOMMANDS or _NUMBER.fullmatch(word):
        return word
    parts = word.split()
    is_command = any(_PROGRAM.fullmatch(part) or _SCRIPT.fullmatch(part) for part in parts[:-1])
    return _nested(word) if is_command else HIDDEN


def _override(word: str) -> str:
    """``SECTION.FIELD=VALUE``: a field of Megatron-Bridge's configuration, as recipes take it."""
    match = _FIELD.fullmatch(word)
    if match is None:
        return HIDDEN
    # Not earlier: its package imports torch.
    from megatron_ttrace.mcore.fronts import bridge_options

    if match[2] not in (*bridge_options.SECTIONS, *bridge_options.OTHERS):
        return HIDDEN
    # Switches are no secrets.
    allowed = match[4] in ("True", "False", "None")
    allowed |= is_shown(bridge_options.option_of(match[2], match[3]))
    return f"{match[1]}={text(match[4]) if allowed else HIDDEN}"


def _nested(value: str) -> str:
    try:
        shown = command(_split(value))
    except ValueError:
        return HIDDEN
    quoted = [word.strip() if _is_separator(word) else shlex.quote(word) for word in shown]
    return " ".join(word for word in quoted if word)


def _split(value: str) -> list[str]:
    """A shell's text as words and separators. Raises ``ValueError`` for an open quote."""
    lexer = shlex.shlex(value.replace("\\\n", " "), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    return list(lexer)


def _is_place(word: str) -> bool:
    """Whether a word before the script names it, a file that exists, or a program."""
    if "://" in word:
        return False
    if _PROGRAM.fullmatch(word) or re.fullmatch(r"[\w./-]+\.(py|sh|ya?ml|slurm|sbatch)", word):
        return True
    try:
        return os.path.exists(word) or shutil.which(word) is not None
    except (OSError, ValueError):
        return False


def environment(chosen: Mapping[str, str]) -> dict[str, str]:
    """Variables with the values that may be shown."""
    return {name: text(value) if name in _VARIABLES else HIDDEN for name, value in chosen.items()}


def identity(value: Any, *, allowed: bool) -> Any:
    """A JSON value for comparison: itself if it may be shown, else a digest of it.

    Switches and absent values are no secrets.
    """
    if value is None or isinstance(value, bool):
        return value
    if allowed:
        if isinstance(value, list):
            return [identity(item, allowed=True) for item in value]
        return text(value) if isinstance(value, str) else value
    return f"digest {hashlib.sha256(repr(value).encode()).hexdigest()[:12]}"
