"""Time of collective operations over the links of one node and the network between nodes.

A group of g ranks is laid out n to a node over m = g/n nodes. Messages take a latency and
bytes over a bandwidth; each collective runs the cheaper of two algorithms where there are two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.errors import DomainError
from specmodel.hardware import Link

Floats = NDArray[np.float64]
Collective = Literal["all-reduce", "all-gather", "all-to-all", "send", "send between nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What joins the ranks of a deployment.

    Attributes
    ----------
    link : Link or None
        Between the devices of a node; None where they are not joined.
    network : Link or None
        Between nodes, the share of one device; None for a single node.
    devices_per_node : int
    """

    link: Link | None
    network: Link | None = None
    devices_per_node: int = 8

    def inside(self, ranks: int) -> int:
        """Return how many ranks of a group share a node."""
        return min(ranks, self.devices_per_node)

    def nodes(self, ranks: int) -> int:
        """Return how many nodes a group spans.

        Raises
        ------
        DomainError
            When its last node would be filled in part.
        """
        if ranks > self.devices_per_node and ranks % self.devices_per_node:
            raise DomainError(
                f"a group of {ranks} devices must fill its nodes of {self.devices_per_node} "
                "(devices_per_node)"
            )
        return max(1, ranks // self.devices_per_node)

    def over_link(self, size: Floats) -> Floats:
        """Return the time of one message inside a node. [s]"""
        if self.link is None:
            raise DomainError("the device has no interconnect: it works alone (tp, dp, pp of 1)")
        return self.link.time(size)

    def over_network(self, size: Floats) -> Floats:
        """Return the time of one message between nodes. [s]"""
        if self.network is None:
            raise DomainError("what joins the nodes is not known (network)")
        return self.network.time(size)


def collective_time(kind: Collective, size: ArrayLike, ranks: int, fabric: Fabric) -> Floats:
    r"""Return the time of one collective over a group.

    An all-reduce takes the cheaper of one step, in which each rank sends its S bytes to all
    others, and two (reduce-scatter, all-gather):

    .. math::
        \min\Big(t + \frac{(n - 1) S}{b},\; 2 t + \frac{2 (n - 1)}{n} \frac{S}{b}\Big)

    Over several nodes it runs in two steps inside them, and between those on 1/n of the bytes
    between nodes, each device over its own share of the network.

    Parameters
    ----------
    kind : str
        ``all-reduce``, ``all-gather``, ``all-to-all``, ``send`` (to a neighbour in the node) or
        ``send between nodes``.
    size : array_like
        S: of the vector that is reduced, of the gathered result, of all that one rank sends
        (its own share included), of the message. [B]
    ranks : int
        Size of the group, g. [-]
    fabric : Fabric

    Returns
    -------
    float or ndarray
        [s]

    Raises
    ------
    DomainError
        When the group needs a link or a network that is not there.

    References
    ----------
    .. [1] Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in
       MPICH, IJHPCA 19(1), 2005, section 3.

    Examples
    --------
    >>> fabric = Fabric(link=Link(latency=5e-6, bandwidth=225e9))
    >>> print(f"{collective_time('all-reduce', 8192, 8, fabric) * 1e6:.2f} us")
    5.25 us
    """
    bytes_ = np.asarray(size, dtype=np.float64)
    if kind == "send":
        return fabric.over_link(bytes_)
    if kind == "send between nodes":
        return fabric.over_network(bytes_)
    return _GROUPED[kind](bytes_, fabric.inside(ranks), fabric.nodes(ranks), fabric)


def _over(fabric: Fabric, n: int, m: int, inner: Floats, outer: Floats) -> tuple[Floats, Floats]:
    """Return times of one message inside the node and one between nodes, 0 where there is none."""
    zero = np.zeros_like(inner)
    return (
        fabric.over_link(inner) if n > 1 else zero,
        fabric.over_network(outer) if m > 1 else zero,
    )


def _all_reduce(size: Floats, n: int, m: int, fabric: Fabric) -> Floats:
    once = _over(fabric, n, m, (n - 1) * size, (m - 1) * size / n)
    half = _over(fabric, n, m, (n - 1) / n * size, (m - 1) / m * size / n)
    (inside, between), (scatter, exchange) = once, half
    inside = np.minimum(inside, 2 * scatter) if m == 1 else 2 * scatter
    return np.asarray(inside + np.minimum(between, 2 * exchange))


def _all_gather(size: Floats, n: int, m: int, fabric: Fabric) -> Floats:
    inside, between = _over(fabric, n, m, (n - 1) / n * size, (m - 1) / m * size / n)
    return inside + between


def _all_to_all(size: Floats, n: int, m: int, fabric: Fabric) -> Floats:
    """Both fabrics at the same time."""
    ranks = n * m
    return np.maximum(*_over(fabric, n, m, (n - 1) / ranks * size, (ranks - n) / ranks * size))


_GROUPED: dict[str, Callable[[Floats, int, int, Fabric], Floats]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
}
