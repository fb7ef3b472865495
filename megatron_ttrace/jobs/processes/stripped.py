# SPDX-License-Identifier: Apache-2.0
"""The environment of code that may be a stranger's: nothing in it that may be secret.

It is a list of what is passed on, not of what is removed: nobody knows how secrets are called.
"""

import re
import site
from collections.abc import Mapping
from pathlib import Path

_NAMES = frozenset(
    {
        *("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "TMPDIR", "SHELL"),
        *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CI", "no_proxy"),
    }
)
_PREFIXES = (
    *("LC_", "PYTHON", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "ATEN_", "DNNL_"),
    *("ONEDNN_", "CUDA_", "CUDNN_", "CUBLAS", "NVIDIA_", "NCCL_", "NVTE_", "GLOO_", "UCX_"),
    *("TORCH", "PYTORCH", "TRITON_", "MEGATRON_", "TTRACE_"),
)
_SECRET = re.compile(r"(?i)token|secret|pass|auth|cred|key|login|user|url|uri|dsn|cookie|session")
"""In a name: the variables above need none of these words."""
_WITH_SECRETS = re.compile(r"://[^/\s]*@")
"""In a value: a name and a password in an address."""


def of(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """The variables that a training job needs, of those of this process.

    ``home``: an empty folder, in place of the user's: that one has credentials in files.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if (name in _NAMES or name.startswith(_PREFIXES))
        and not _SECRET.search(name)
        and not _WITH_SECRETS.search(value)
    }
    if site.ENABLE_USER_SITE:
        # Packages may be installed in the user's home.
        kept.setdefault("PYTHONUSERBASE", site.getuserbase())
    return {**kept, "HOME": str(home)}
