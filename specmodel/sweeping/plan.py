"""What a sweep evaluates: cases, their grid, and the blocks it is cut into."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel._version import __version__
from specmodel.acceptance import Acceptance
from specmodel.architectures import Architecture
from specmodel.drafters import Drafter
from specmodel.errors import (
    DomainError,
    ExtrapolationWarning,
    SpecmodelError,
    brief,
    did_you_mean,
    real_array,
    whole_array,
)
from specmodel.hardware import Device
from specmodel.labelled import VARIABLES, speculate
from specmodel.roofline import Execution

DEFAULT_VARIABLES = ("T_p", "T_v", "T_d", "G", "S", "k_star", "S_star")
"""What a sweep keeps by default."""

REGIMES = ("I", "II", "III")
"""Regimes as a file holds them: 1, 2, 3; 0 where a case was refused."""

INNER = ("B", "k", "L", "alpha")
"""Axes of the grid of one case, in the order of the file."""

_BLOCK_POINTS = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One setup, whose numbers of sequences, drafts and context the sweep varies.

    `acceptance` may have an axis of its own (`Geometric` of several alphas), the same in all
    cases of a sweep.
    """

    device: Device
    target: Architecture
    drafter: Drafter
    acceptance: Acceptance
    execution: Execution
    T_h: float = 0.0
    T_o: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is swept.

    Attributes
    ----------
    axes : mapping of str to tuple
        Names and labels of the axes of the cases, slowest first.
    cases : mapping of tuple to Case or str
        The case at each combination of labels, or why there is none.
    B, k, L : ndarray
        Sequences [-], drafts [token], context [token]; one-dimensional.
    variables : tuple of str
        Which of `speculate`'s variables are kept.
    block_points : int
        Points of the grid that are in memory at a time, about.
    attrs : mapping of str to str
        Attributes of the file, beside the version.

    Raises
    ------
    DomainError
        When a case is missing, no case is possible, an axis is empty or unordered, or a text
        cannot be written in UTF-8.
    """

    axes: Mapping[str, tuple[Any, ...]]
    cases: Mapping[tuple[Any, ...], Case | str]
    B: NDArray[np.float64]
    k: NDArray[np.float64]
    L: NDArray[np.float64]
    variables: tuple[str, ...] = DEFAULT_VARIABLES
    block_points: int = _BLOCK_POINTS
    attrs: Mapping[str, str] = field(default_factory=dict)
    alpha: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, values, low in (("B", self.B, 1), ("L", self.L, 0)):
            real_array(values, name, low=low)
        whole_array(self.k, "k", unit="token")
        whole_array(self.block_points, "block_points", low=1)
        for name in ("B", "k", "L"):
            values = getattr(self, name)
            if values.ndim != 1 or not values.size or len(np.unique(values)) < values.size:
                raise DomainError(f"{name} must be one-dimensional, not empty, without repeats")
        self._check_texts()
        for name in self.variables:
            if name not in VARIABLES:
                hint = did_you_mean(name, VARIABLES)
                raise DomainError(f"unknown variable {brief(name)}{hint}")
        for where in product(*self.axes.values()):
            if where not in self.cases:
                raise DomainError(f"the sweep has no case for {self.label(where)}")
        possible = [case for case in self.cases.values() if isinstance(case, Case)]
        if not possible:
            raise DomainError(
                f"no case of the sweep is possible: {next(iter(self.cases.values()))}"
            )
        alphas = {_alphas(case) for case in possible}
        if len(alphas) > 1:
            raise DomainError("acceptance must have the same axis of alphas in all cases, or none")
        object.__setattr__(self, "alpha", alphas.pop())

    def _check_texts(self) -> None:
        """Check all texts that go into the file."""
        for name, labels in self.axes.items():
            check_text(name, "name of an axis")
            for label in labels:
                check_text(label, name)
        for name, value in self.attrs.items():
            check_text(name, "name of an attribute")
            check_text(value, name)
        for where, case in self.cases.items():
            check_text(case, f"reason of {self.label(where)}")

    @property
    def extrapolated_from(self) -> int | None:
        """The fewest drafts beyond which some case's acceptance is extrapolated; None: none."""
        known = [c.acceptance.measured_k for c in self.cases.values() if isinstance(c, Case)]
        least = min((k for k in known if k is not None), default=None)
        return least if least is not None and self.k.max() > least else None

    def label(self, where: tuple[Any, ...]) -> str:
        """Return a combination of labels in words."""
        return ", ".join(f"{name} {value}" for name, value in zip(self.axes, where, strict=True))

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis, in the order of the file."""
        inner = {"B": self.B.size, "k": self.k.size, "L": self.L.size}
        if self.alpha:
            inner["alpha"] = len(self.alpha)
        return {**{name: len(labels) for name, labels in self.axes.items()}, **inner}

    @property
    def points(self) -> int:
        """Combinations of all axes."""
        return math.prod(self.sizes.values())

    def dims(self, variable: str) -> tuple[str, ...]:
        """Return a variable's own axes within one case, in the order of the file."""
        own = VARIABLES[variable][0].split()
        return tuple(d for d in INNER if d in own and d in self.sizes)

    @property
    def block(self) -> tuple[int, int]:
        """Lengths in B and L of the blocks that the grid is cut into; k and alpha stay whole."""
        across = self.k.size * max(1, len(self.alpha))
        contexts = min(self.L.size, max(1, self.block_points // across))
        batches = min(self.B.size, max(1, self.block_points // (across * contexts)))
        return batches, contexts

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of every possible case, in order."""
        batches, contexts = self.block
        for where in product(*self.axes.values()):
            case = self.cases[where]
            if isinstance(case, str):
                continue
            outer = tuple(
                labels.index(value) for labels, value in zip(self.axes.values(), where, strict=True)
            )
            for b in range(0, self.B.size, batches):
                for c in range(0, self.L.size, contexts):
                    yield Block(
                        case=case,
                        outer=outer,
                        start=(b, c),
                        B=self.B[b : b + batches],
                        k=self.k,
                        L=self.L[c : c + contexts],
                        variables=self.variables,
                    )

    def key(self) -> str:
        """Return a hash of everything the results depend on."""
        parts = (
            __version__,
            list(self.axes.items()),
            [(where, self.cases[where]) for where in product(*self.axes.values())],
            (self.B, self.k, self.L),
            self.variables,
            self.block,
        )
        return hashlib.sha256(repr(_plain(parts)).encode()).hexdigest()


def check_text(value: Any, name: str) -> None:
    """Check that a value, where it is text, can be written in UTF-8.

    Raises
    ------
    DomainError
        When it cannot: a file name may hold any bytes.
    """
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        raise DomainError(f"{name} must be UTF-8 text; got {brief(value)}") from None


def _alphas(case: Case) -> tuple[float, ...]:
    """Return the axis of alphas that a case's acceptance has; empty where it has none."""
    found = np.asarray(getattr(case.acceptance, "alpha", np.nan))
    return tuple(float(a) for a in found) if found.ndim else ()


def _plain(value: Any) -> Any:
    """Return a value made of records, sets and arrays in a form whose text is always the same."""
    if is_dataclass(value):
        kept = {f.name: getattr(value, f.name) for f in fields(value)}
        return type(value).__name__, _plain(kept)
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(each)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A part of one case's grid: what a worker is sent."""

    case: Case
    outer: tuple[int, ...]
    start: tuple[int, int]
    B: NDArray[np.float64]
    k: NDArray[np.float64]
    L: NDArray[np.float64]
    variables: tuple[str, ...]

    @property
    def name(self) -> str:
        """Where it lies, such as 0-1-250-0: indices of its case, first index in B and in L."""
        return "-".join(str(i) for i in (*self.outer, *self.start))

    @property
    def points(self) -> int:
        """Points of the grid that it holds."""
        alphas = len(_alphas(self.case))
        return self.B.size * self.k.size * self.L.size * max(1, alphas)

    @property
    def spans(self) -> dict[str, slice]:
        """Where it lies along the axes that blocks are cut along."""
        b, c = self.start
        return {"B": slice(b, b + self.B.size), "L": slice(c, c + self.L.size)}


def evaluate(block: Block) -> dict[str, NDArray[Any]] | str:
    """Return the block's variables over their own axes of B, k, L, alpha; or why it has none."""
    case = block.case
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)
            found = speculate(
                case.device,
                case.target,
                case.drafter,
                case.acceptance,
                B=block.B,
                k=block.k,
                L=block.L,
                T_h=case.T_h,
                T_o=case.T_o,
                execution=case.execution,
            )
    except SpecmodelError as error:
        return str(error)
    return {name: _kept(name, found[name].values) for name in block.variables}


def _kept(name: str, values: Any) -> NDArray[Any]:
    if name == "regime":
        return np.asarray(np.searchsorted(REGIMES, values), dtype=np.int8) + np.int8(1)
    return np.asarray(values, dtype=np.float64)


def dtype_of(variable: str) -> Any:
    """Return the type a variable is kept in."""
    return np.int8 if variable == "regime" else np.float64
