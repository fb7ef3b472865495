# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's tracker of named random states (``--te-rng-tracker``)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CudaRNGStatesTracker:
    """Named states of the one generator there is; see ``random_states.py``."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return copies of all states."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Take all states back."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state seeded with ``seed``; neither may have been added before."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"state {name} already exists")
        self.seeds_.add(seed)
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        self.states_[name] = torch.default_generator.get_state()
        torch.default_generator.set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state ``name`` inside the context."""
        if name not in self.states_:
            raise KeyError(f"state {name} has not been added")
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.default_generator.get_state()
            torch.default_generator.set_state(before)
