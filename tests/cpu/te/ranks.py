# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks, forked from this process, over gloo."""

import os
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist


def _main(rank, size, folder, function, args):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def fork(size, function):
    """Fork ``size`` processes that call ``function(rank)``; fail if one of them does.

    Forked by hand: torch's own launcher imports it anew in every rank, which takes seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            with warnings.catch_warnings():
                # The threads are PyTorch's, idle; the children make their own.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    function(rank)
                    code = 0
                except BaseException:  # noqa: BLE001 - any failure is reported
                    (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
                finally:
                    os._exit(code)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        assert codes == [0] * size, "\n".join(errors) or f"exit codes {codes}"


def run_ranks(size, function, *args):
    """Fork ``size`` ranks that call ``function(rank, *args)``; fail if one of them does."""
    with tempfile.TemporaryDirectory() as folder:
        fork(size, lambda rank: _main(rank, size, folder, function, args))


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def same_gradients(ours, theirs, tensors):
    """Both outputs are equal, and so are the gradients of ``tensors``, from a random one."""
    grad = torch.randn_like(theirs)
    gradients = (torch.autograd.grad(output, tensors, grad) for output in (ours, theirs))
    close(ours, theirs)
    for actual, expected in zip(*gradients, strict=True):
        close(actual, expected, 1e-6 if actual.dtype == torch.float32 else 1e-10)
