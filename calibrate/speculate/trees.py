"""Where drafts stand: a chain, or a tree with several candidates for a position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from specmodel.errors import DomainError


@dataclass(frozen=True)
class Tree:
    """Nodes below a root, the last committed token, whose own number is -1.

    Parameters
    ----------
    parents : tuple of int
        Parent of each node. Nodes are listed by depth, children of one parent side by side.

    Raises
    ------
    DomainError
        When they are not.

    Examples
    --------
    >>> Tree.of([2, 1]).parents
    (-1, -1, 0, 1)
    >>> Tree.of([2, 1]).levels
    (range(0, 2), range(2, 4))
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.parents) != sorted(self.parents) or any(
            not -1 <= parent < node for node, parent in enumerate(self.parents)
        ):
            raise DomainError(
                "a tree lists nodes by depth, children of one parent side by side; got parents "
                f"{list(self.parents)}"
            )

    @classmethod
    def chain(cls, k: int) -> Tree:
        """Return k nodes, one below the other.

        Raises
        ------
        DomainError
            When k is negative.
        """
        if k < 0:
            raise DomainError(f"k must be >= 0; got {k}")
        return cls(tuple(range(-1, k - 1)))

    @classmethod
    def of(cls, branching: Sequence[int]) -> Tree:
        """Return the tree in which every node of depth d has ``branching[d]`` children.

        Raises
        ------
        DomainError
            When a number is below 1.
        """
        if any(count < 1 for count in branching):
            raise DomainError(f"a tree's branching must be >= 1; got {list(branching)}")
        parents: list[int] = []
        level = [-1]
        for count in branching:
            start = len(parents)
            parents += [parent for parent in level for _ in range(count)]
            level = list(range(start, len(parents)))
        return cls(tuple(parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, from 1. [token]"""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return tuple(found)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """Nodes of each depth."""
        found, start = [], 0
        for _, same in groupby(self.depths):
            stop = start + len(list(same))
            found.append(range(start, stop))
            start = stop
        return tuple(found)

    @property
    def k(self) -> int:
        """Most drafts that a round can accept, its depth. [token]"""
        return len(self.levels)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.k == len(self.parents)

    def sees(self, device: Any = "cpu") -> Tensor:
        """Return which of root and nodes each of them attends to, (nodes + 1, nodes + 1)."""
        return _sees(self.parents, torch.device(device))

    def places(self, device: Any = "cpu") -> Tensor:
        """Return the depth of root and nodes, (nodes + 1,). [token]"""
        return _places(self.depths, torch.device(device))


@lru_cache
def _sees(parents: tuple[int, ...], device: torch.device) -> Tensor:
    found = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents, start=1):
        found[node] |= found[parent + 1]
    return found.to(device)


@lru_cache
def _places(depths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor((0, *depths), device=device)
