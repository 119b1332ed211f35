"""Drafters: what producing k drafts takes, what memory it holds, and how often it proposes.

A record lists its passes; each goes through the same pass-cost function as the target. Where
no architecture is given, a head is derived from the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.architectures import (
    Architecture,
    Fusion,
    eagle3_head,
    eagle_head,
    load_model,
    mtp_head,
)
from specmodel.dtypes import BYTES
from specmodel.errors import (
    ArchitectureError,
    DomainError,
    brief,
    one_flag,
    one_number,
    one_whole,
    whole_array,
)
from specmodel.hardware import Device, Link, load_device

Floats = NDArray[np.float64]

PEAGLE = "peagle"
"""Kind of head that `Parallel` takes."""
BLOCK_HEADS = ("dflash", "dspark")
"""Kinds of heads that `BlockDiffusion` takes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftPass:
    """One kind of draft pass and how often a round runs it; fields broadcast over k.

    Attributes
    ----------
    architecture : Architecture
    count : ndarray
        Passes per round. [-]
    W : ndarray
        Positions per sequence. [token]
    head_rows : ndarray
        Rows per sequence through the LM head. [token]
    fuse : bool
        Whether the head's input fusion runs.
    """

    architecture: Architecture
    count: Floats
    W: Floats
    head_rows: Floats
    fuse: bool = True


@dataclass(frozen=True, slots=True)
class Drafter(ABC):
    """What every drafter answers.

    Attributes
    ----------
    host_time : float
        Host time of a round besides the drafter's passes. [s]
    tp : int or None
        Its own tensor-parallel degree; None: the target's, or 1 on a device of its own.
    device : Device or None
        The device it runs on, when not the target's.
    link : Link or None
        What joins that device to the target's.
    overlapped : bool
        Whether it drafts the next round while the target verifies this one. Then only what
        verification does not hide of T_d counts: a bound, as drafts made for a rejected
        continuation are lost.
    """

    kind: ClassVar[str]
    in_stages: ClassVar[bool] = False
    """Whether its passes run through all stages of the target's pipeline."""
    needs_model: ClassVar[bool] = False
    """Whether it cannot do without an architecture."""
    host_time: float = field(default=0.0, kw_only=True)
    tp: int | None = field(default=None, kw_only=True)
    device: Device | None = field(default=None, kw_only=True)
    link: Link | None = field(default=None, kw_only=True)
    overlapped: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        model = getattr(self, "architecture", None)
        if model is not None or self.needs_model:  # a name or a file is as good
            self._set("architecture", load_model(model))  # type: ignore[arg-type]
        if self.device is not None:
            self._set("device", load_device(self.device))
        if not isinstance(self.link, Link | None):
            raise DomainError(f"the drafter's link must be a Link or None; got {brief(self.link)}")
        one_number(self.host_time, "host time", low=0, unit="s")
        if self.tp is not None:
            self._set("tp", one_whole(self.tp, "the drafter's tp", low=1))
        one_flag(self.overlapped, "overlapped")
        if (self.device is None) != (self.link is None):
            raise DomainError("a drafter on a device of its own needs a link, and only then")
        if self.overlapped and self.device is None:
            raise DomainError("drafting overlaps verification only on a device of its own")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def hit_rate(self) -> float:
        """Share of rounds in which it finds anything to propose. [-]"""
        return 1.0

    @property
    def max_k(self) -> int | None:
        """Most drafts it can propose; None: no limit of its own. [token]"""
        return None

    def rows(self, k: ArrayLike) -> Floats:
        """Return the positions that verifying k drafts takes, W. [token]"""
        return whole_array(k, "k", unit="token") + 1

    @abstractmethod
    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return the passes of a round with k drafts, fields broadcast over k."""

    def message_bytes(self, target: Architecture, k: ArrayLike) -> Floats:
        """Return what crosses a link in a round, per sequence: token ids, and a head's features."""
        ids = 4.0 * (self.rows(k) + whole_array(k, "k", unit="token"))
        held = self.weights(target)
        features = held.fusion.inputs - target.hidden_size if held and held.fusion else 0
        if held and held.fusion and not held.fusion.every_pass:
            features = held.fusion.inputs
        return ids + self.rows(k) * max(features, 0) * BYTES[target.dtype]

    def weights(self, target: Architecture) -> Architecture | None:
        """Return the architecture whose weights it keeps besides the target's."""
        return None

    def copies(self, k: ArrayLike) -> Floats:
        """Return how many copies of `weights` are resident for k drafts."""
        return np.asarray(1.0)

    def cache(self, target: Architecture) -> Architecture | None:
        """Return the architecture whose KV it keeps besides the target's."""
        return self.weights(target)


def checked_drafter(value: Any) -> Drafter:
    """Return a drafter record.

    Raises
    ------
    DomainError
        When it is something else.
    """
    if isinstance(value, Drafter):
        return value
    raise DomainError(f"drafter must be a record such as Eagle3(); got {brief(value)}")


@dataclass(frozen=True, slots=True)
class DraftModel(Drafter):
    """A small model that drafts one token per pass.

    Its first pass takes two rows: after a fully accepted round it has yet to see its own last
    draft as well as the bonus token.

    References
    ----------
    .. [1] Leviathan et al., ICML 2023, arXiv:2211.17192; Chen et al., arXiv:2302.01318.
    """

    kind: ClassVar[str] = "draft-model"
    needs_model: ClassVar[bool] = True
    architecture: Architecture

    def weights(self, target: Architecture) -> Architecture:
        """Return the small model.

        Raises
        ------
        ArchitectureError
            When its vocabulary is not the target's.
        """
        _check_vocabulary(self.architecture, target)
        return self.architecture

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return one catch-up pass of two rows, then k - 1 of one."""
        return _first_and_rest(self.weights(target), k, first_width=lambda n: np.full_like(n, 2.0))


@dataclass(frozen=True, slots=True)
class _Head(Drafter):
    """A draft head: its first pass takes a row for every position the target just verified."""

    derive: ClassVar[Callable[[Architecture], Architecture]]
    architecture: Architecture | None = None

    def weights(self, target: Architecture) -> Architecture:
        """Return the head, derived from the target where none was given."""
        if self.architecture is None:
            return type(self).derive(target)
        _check_head(self.architecture, target, self.kind)
        return self.architecture

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return one pass of k + 1 rows, then k - 1 of one."""
        return _first_and_rest(self.weights(target), k, first_width=lambda n: n + 1)


@dataclass(frozen=True, slots=True)
class Eagle(_Head):
    """EAGLE: one layer over token embedding and target feature, LM head shared.

    References
    ----------
    .. [1] Li et al., EAGLE, ICML 2024, arXiv:2401.15077.
    """

    kind: ClassVar[str] = "eagle"
    derive: ClassVar[Callable[[Architecture], Architecture]] = staticmethod(eagle_head)


@dataclass(frozen=True, slots=True)
class Eagle3(_Head):
    """EAGLE-3: one layer over fused target features, its own LM head of a reduced vocabulary.

    References
    ----------
    .. [1] Li et al., EAGLE-3, NeurIPS 2025, arXiv:2503.01840.
    """

    kind: ClassVar[str] = "eagle3"
    derive: ClassVar[Callable[[Architecture], Architecture]] = staticmethod(eagle3_head)


@dataclass(frozen=True, slots=True)
class MTP(_Head):
    """Multi-token prediction (NextN): the block that the target's checkpoint carries, reused.

    References
    ----------
    .. [1] DeepSeek-AI, DeepSeek-V3 Technical Report, section 2.2, arXiv:2412.19437.
    """

    kind: ClassVar[str] = "mtp"
    derive: ClassVar[Callable[[Architecture], Architecture]] = staticmethod(mtp_head)


@dataclass(frozen=True, slots=True)
class Medusa(Drafter):
    """Medusa: k heads on the target's last feature, each one residual block and an LM head.

    References
    ----------
    .. [1] Cai et al., Medusa, ICML 2024, arXiv:2401.10774; FasterDecoding/Medusa
       ``medusa_model.py`` (one residual block a head), read 2026-11-29.
    """

    kind: ClassVar[str] = "medusa"

    def _head(self, target: Architecture) -> Architecture:
        return replace(
            target,
            name=f"Medusa head for {target.name}",
            model_type="medusa",
            head_kind="medusa",
            layers=(),
            fusion=Fusion(inputs=target.hidden_size, bias=True),
            final_norm=False,
            own_embedding=False,
            own_head=True,
            tied_embeddings=False,
            quantisation=None,
            expert_quantisation=None,
            position_params=0,
            encoder_params=0,
            mtp_layers=0,
            mtp_layer=None,
        )

    def weights(self, target: Architecture) -> Architecture:
        """Return one head."""
        return self._head(target)

    def copies(self, k: ArrayLike) -> Floats:
        """Return k: a head for each position."""
        return np.asarray(k, dtype=np.float64)

    def cache(self, target: Architecture) -> None:
        """Medusa heads keep no KV."""
        return

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return k head evaluations of one row each."""
        return _single_rows(self._head(target), k)


@dataclass(frozen=True, slots=True)
class Parallel(Drafter):
    """A draft model that fills all k positions in one pass (PARD), or a head (P-EAGLE).

    The pass takes k + 1 rows: up to two new tokens and k - 1 mask tokens. A head's takes 2k: as
    with EAGLE-3 every position that the target just verified, and k - 1 mask tokens (vLLM,
    ``v1/spec_decode``, parallel drafting, read 2026-11-29).

    References
    ----------
    .. [1] An et al., PARD, arXiv:2504.18583.
    """

    kind: ClassVar[str] = "parallel"
    needs_model: ClassVar[bool] = True
    architecture: Architecture

    def weights(self, target: Architecture) -> Architecture:
        """Return the draft model or head."""
        if self.architecture.head_kind is not None:
            _check_head(self.architecture, target, PEAGLE)
        _check_vocabulary(self.architecture, target)
        return self.architecture

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return one pass of k + 1 rows (a head: 2k), k of them through the LM head."""
        n = whole_array(k, "k", unit="token")
        once = (n > 0).astype(np.float64)
        draft = self.weights(target)
        width = n + 1 if draft.head_kind is None else 2 * n
        return (DraftPass(architecture=draft, count=once, W=width, head_rows=n),)


@dataclass(frozen=True, slots=True)
class NGram(Drafter):
    """Prompt lookup: no device pass; `hit` is the share of rounds that find a match. [-]

    A sequence without a match verifies one row, as in a plain decode step; sequences find
    theirs independently.

    References
    ----------
    .. [1] Saxena, Prompt Lookup Decoding, 2023.
    """

    kind: ClassVar[str] = "ngram"
    hit: float

    def __post_init__(self) -> None:
        Drafter.__post_init__(self)
        one_number(self.hit, "hit rate", low=0, high=1)

    @property
    def hit_rate(self) -> float:
        """Share of rounds in which it finds anything to propose. [-]"""
        return self.hit

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return no pass."""
        return ()


@dataclass(frozen=True, slots=True)
class SelfSpeculative(Drafter):
    """The target's own first layers as the drafter (LayerSkip): weights and KV are shared.

    Verification is costed as a full pass; that it could reuse the drafted layers' KV of the
    accepted tokens is left out.

    Parameters
    ----------
    layer_fraction : float
        Share of the target's layers that a draft pass runs. [-], above 0, at most 1.

    References
    ----------
    .. [1] Elhoushi et al., LayerSkip, ACL 2024, arXiv:2404.16710.
    """

    kind: ClassVar[str] = "self"
    layer_fraction: float = 0.25

    def __post_init__(self) -> None:
        Drafter.__post_init__(self)
        one_number(self.layer_fraction, "layer fraction", high=1, positive=True)

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return k passes of the first layers."""
        layers = round(self.layer_fraction * target.n_layers)
        if not layers:
            raise DomainError(
                f"layer fraction {self.layer_fraction:g} of {target.n_layers} layers is none"
            )
        return _single_rows(target.first_layers(layers), k)


@dataclass(frozen=True, slots=True)
class SparseKV(Drafter):
    """The target itself over a KV cache of `budget` tokens (MagicDec with StreamingLLM).

    References
    ----------
    .. [1] Chen et al., MagicDec, ICLR 2025, arXiv:2408.11049.
    """

    kind: ClassVar[str] = "sparse-kv"
    in_stages: ClassVar[bool] = True
    budget: int = 512

    def __post_init__(self) -> None:
        Drafter.__post_init__(self)
        self._set("budget", one_whole(self.budget, "kv budget", low=1, unit="token"))

    def cache(self, target: Architecture) -> Architecture:
        """Return the target with its KV capped: the compact cache is kept beside the full one."""
        return target.with_kv_budget(self.budget)

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return k passes of the target over the budget."""
        return _single_rows(target.with_kv_budget(self.budget), k)


@dataclass(frozen=True, slots=True)
class BlockDiffusion(Drafter):
    """A head that denoises a block of drafts in one pass over target features (DFlash, DSpark).

    The pass takes k + 1 rows: the last committed token and k mask tokens. DSpark's takes k: the
    last committed token's row is the first draft's; then each draft is corrected by the one
    before it, one after another. The LM head is the target's.

    References
    ----------
    .. [1] DFlash, arXiv:2602.06036; SpecForge draft configurations, read 2026-11-29.
    .. [2] DSpark, arXiv:2607.05147; vLLM ``v1/worker/gpu/spec_decode/dspark/speculator.py`` (rows
       of a block), read 2026-11-29.
    """

    kind: ClassVar[str] = "block-diffusion"
    needs_model: ClassVar[bool] = True
    architecture: Architecture

    @property
    def max_k(self) -> int | None:
        """The block; of DFlash's the last committed token takes a place. [token]"""
        block = self.architecture.block_size
        return None if block is None else block - self._beside

    @property
    def _beside(self) -> int:
        """Rows of a pass that give no draft."""
        return 0 if self.architecture.head_kind == "dspark" else 1

    def weights(self, target: Architecture) -> Architecture:
        """Return the head."""
        kind = self.architecture.head_kind
        _check_head(self.architecture, target, kind if kind in BLOCK_HEADS else BLOCK_HEADS[0])
        return self.architecture

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return one pass with k rows through the LM head, and k corrections of one row."""
        n = whole_array(k, "k", high=self.max_k or np.inf, unit="token")
        once = (n > 0).astype(np.float64)
        head = self.weights(target)
        block = DraftPass(architecture=head, count=once, W=n + self._beside, head_rows=n)
        corrections = _single_rows(head.bigram, n) if head.bigram is not None else ()
        return (block, *corrections)


@dataclass(frozen=True, slots=True)
class Lookahead(Drafter):
    """Lookahead (Jacobi) decoding: no draft pass, the target's pass carries more rows.

    With n-grams of k + 1 tokens it verifies (window + guesses) k rows per sequence. Greedy.

    References
    ----------
    .. [1] Fu et al., Lookahead Decoding, ICML 2024, arXiv:2402.02057.
    """

    kind: ClassVar[str] = "lookahead"
    window: int = 7
    guesses: int = 7

    def __post_init__(self) -> None:
        Drafter.__post_init__(self)
        for name in ("window", "guesses"):
            self._set(name, one_whole(getattr(self, name), name, low=1))

    def rows(self, k: ArrayLike) -> Floats:
        """Return (window + guesses) k, and 1 at k = 0. [token]"""
        n = whole_array(k, "k", unit="token")
        return np.where(n > 0, (self.window + self.guesses) * n, 1.0)

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return no pass."""
        return ()


@dataclass(frozen=True, slots=True)
class _Tree(Drafter):
    """What trees share: where and how they are drafted is another drafter's."""

    drafter: Drafter

    def __post_init__(self) -> None:
        checked_drafter(self.drafter)
        for each in fields(Drafter):
            own, inner = getattr(self, each.name), getattr(self.drafter, each.name)
            if each.default not in (own, inner) and own != inner:
                raise DomainError(
                    f"{each.name} is given twice: {brief(own)} of the tree, {brief(inner)} of what "
                    "drafts it"
                )
            self._set(each.name, inner if own == each.default else own)
        Drafter.__post_init__(self)

    @property
    def hit_rate(self) -> float:
        """The other drafter's. [-]"""
        return self.drafter.hit_rate

    def weights(self, target: Architecture) -> Architecture | None:
        """Return the other drafter's."""
        return self.drafter.weights(target)

    def copies(self, k: ArrayLike) -> Floats:
        """Return the other drafter's."""
        return self.drafter.copies(k)

    def cache(self, target: Architecture) -> Architecture | None:
        """Return the other drafter's."""
        return self.drafter.cache(target)

    def _by_depth(
        self, target: Architecture, n: Floats, widths: Callable[[int], ArrayLike], depths: int
    ) -> tuple[DraftPass, ...]:
        """Return the first pass, then one over each depth but the last."""
        once = self.drafter.passes(target, n)
        if not once or isinstance(self.drafter, Medusa | Parallel | BlockDiffusion):
            return once
        first = (n > 0).astype(np.float64)
        found = [once[0] if len(once) > 1 else replace(once[0], count=first)]
        for depth in range(1, depths):
            rows, count = np.full_like(n, widths(depth)), (n > depth).astype(np.float64)
            found.append(replace(once[-1], count=count, W=rows, head_rows=rows))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class DraftTree(_Tree):
    """Another drafter that drafts a static tree: several candidates for a position.

    k counts depths: verification takes a row for every node of the first k. What drafts token by
    token runs a pass for each depth, over the nodes of the depth before. Where and how it runs is
    the other drafter's.

    Parameters
    ----------
    drafter : Drafter
    widths : tuple of int
        Nodes of each depth. [token], >= 1

    References
    ----------
    .. [1] Miao et al., SpecInfer, ASPLOS 2024, arXiv:2305.09781.

    Examples
    --------
    >>> DraftTree(drafter=Lookahead(), widths=(3, 6)).rows([0, 1, 2]).tolist()
    [1.0, 4.0, 10.0]
    """

    kind: ClassVar[str] = "tree"
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        _Tree.__post_init__(self)
        if whole_array(self.widths, "nodes of a depth", low=1).ndim != 1:
            raise DomainError(
                f"widths must be a list, one for each depth; got {brief(self.widths)}"
            )
        _check_depth(self.drafter, len(self.widths))

    @property
    def max_k(self) -> int | None:
        """The depth. [token]"""
        return len(self.widths)

    def rows(self, k: ArrayLike) -> Floats:
        """Return root and nodes of the first k depths. [token]"""
        n = whole_array(k, "k", high=len(self.widths), unit="token")
        return np.asarray(np.cumsum((1.0, *self.widths))[n.astype(int)])

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return the other drafter's first pass, then one for each depth."""
        n = whole_array(k, "k", high=len(self.widths), unit="token")
        return self._by_depth(target, n, lambda d: self.widths[d - 1], len(self.widths))


@dataclass(frozen=True, slots=True, eq=False)
class DraftTrees(_Tree):
    """Many static trees of one drafter, each as `DraftTree` alone, to be priced at once.

    k is the depth of each tree, 0 for none.

    Parameters
    ----------
    drafter : Drafter
    widths : ndarray, shape (trees, depths)
        Nodes of each depth, 0 below the deepest. [token]
    """

    kind: ClassVar[str] = "trees"
    widths: Floats

    def __post_init__(self) -> None:
        _Tree.__post_init__(self)
        _check_depth(self.drafter, self.widths.shape[1])

    def rows(self, k: ArrayLike) -> Floats:
        """Return root and nodes of each tree. [token]"""
        return 1.0 + np.where(whole_array(k, "k", unit="token") > 0, self.widths.sum(1), 0.0)

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return the other drafter's first pass, then one for each depth."""
        n, rows = whole_array(k, "k", unit="token"), np.maximum(self.widths, 1.0)
        return self._by_depth(target, n, lambda d: rows[:, d - 1], self.widths.shape[1])


@dataclass(frozen=True, slots=True)
class DynamicTree(_Tree):
    """Another drafter that grows a tree by its own confidence; its best nodes are verified.

    Each depth after the first is drafted for the `topk` most promising nodes of the one before;
    of all that were drafted, `nodes` are verified.

    Parameters
    ----------
    drafter : Drafter
    topk : int
        Nodes of a depth that are drafted on. [token], >= 1
    nodes : int
        Verified beside the root. [token], >= 1

    References
    ----------
    .. [1] Li et al., EAGLE-2, EMNLP 2024, arXiv:2406.16858, section 4.

    Examples
    --------
    >>> DynamicTree(drafter=Eagle(), topk=10, nodes=60).rows([0, 6]).tolist()
    [1.0, 61.0]
    """

    kind: ClassVar[str] = "dynamic-tree"
    topk: int
    nodes: int

    def __post_init__(self) -> None:
        _Tree.__post_init__(self)
        for name in ("topk", "nodes"):
            self._set(name, one_whole(getattr(self, name), name, low=1, unit="token"))

    @property
    def max_k(self) -> int | None:
        """The other drafter's. [token]"""
        return self.drafter.max_k

    def rows(self, k: ArrayLike) -> Floats:
        """Return root and verified nodes, 1 at k = 0. [token]"""
        return np.where(whole_array(k, "k", unit="token") > 0, 1.0 + self.nodes, 1.0)

    def passes(self, target: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
        """Return the other drafter's first pass, then one of `topk` rows for each depth."""
        n = whole_array(k, "k", unit="token")
        return self._by_depth(target, n, lambda _: self.topk, int(n.max(initial=0)))


KINDS: dict[str, str] = {
    DraftModel.kind: "a small model of the family drafts token by token",
    Eagle.kind: "one-layer head over embedding and target feature, shared LM head",
    Eagle3.kind: "one-layer head over fused target features, reduced vocabulary",
    MTP.kind: "the multi-token-prediction block that the target's checkpoint carries",
    Medusa.kind: "independent heads on the target's last feature, one for each draft",
    Parallel.kind: "a small model or head fills all positions in one pass (PARD, P-EAGLE)",
    BlockDiffusion.kind: "a head denoises a block of drafts in one pass (DFlash, DSpark)",
    Lookahead.kind: "n-grams from Jacobi iterations inside the target's own pass",
    NGram.kind: "looks the last tokens up in prompt and output, no device work",
    SelfSpeculative.kind: "the target's own first layers (LayerSkip)",
    SparseKV.kind: "the target itself over a capped KV cache (MagicDec)",
}
"""Drafter kinds and what they are."""


def _single_rows(architecture: Architecture, k: ArrayLike) -> tuple[DraftPass, ...]:
    n = whole_array(k, "k", unit="token")
    one = np.ones_like(n)
    return (DraftPass(architecture=architecture, count=n, W=one, head_rows=one),)


def _first_and_rest(
    architecture: Architecture, k: ArrayLike, *, first_width: Callable[[Floats], Floats]
) -> tuple[DraftPass, ...]:
    n = whole_array(k, "k", unit="token")
    one = np.ones_like(n)
    first = (n > 0).astype(np.float64)
    every = architecture.fusion is None or architecture.fusion.every_pass
    return (
        DraftPass(architecture=architecture, count=first, W=first_width(n), head_rows=one),
        DraftPass(
            architecture=architecture, count=np.maximum(n - 1, 0), W=one, head_rows=one, fuse=every
        ),
    )


def _check_depth(drafter: Drafter, depth: int) -> None:
    if drafter.max_k is not None and depth > drafter.max_k:
        raise DomainError(f"a {drafter.kind} drafter has {drafter.max_k} positions at most")


def _check_vocabulary(draft: Architecture, target: Architecture) -> None:
    """Refuse another tokenizer; tables padded to a different multiple differ by less than 1%."""
    if abs(draft.vocab_size / target.vocab_size - 1) > 0.01:
        raise ArchitectureError(
            f"{draft.name} has a vocabulary of {draft.vocab_size}, {target.name} one of "
            f"{target.vocab_size}: a draft shares the target's tokenizer"
        )


def _check_head(head: Architecture, target: Architecture, kind: str) -> None:
    if head.head_kind != kind or head.fusion is None:
        what = f"an {head.head_kind} head" if head.head_kind else "a whole model"
        raise ArchitectureError(f"{head.name} is {what}: it cannot be the draft of {kind}")
    _check_vocabulary(head, target)
    if kind in BLOCK_HEADS:
        if head.hidden_size != target.hidden_size:
            raise ArchitectureError(
                f"{head.name} has width {head.hidden_size}, {target.name} has "
                f"{target.hidden_size}: it cannot draft for it"
            )
        return
    features = head.fusion.inputs // (3 if kind in (Eagle3.kind, PEAGLE) else 2)
    if features != target.hidden_size:
        raise ArchitectureError(
            f"{head.name} takes features of width {features}, {target.name} has "
            f"{target.hidden_size}: it cannot draft for it"
        )
