"""The notebook interface: the same numbers as labelled arrays with units and basis."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel import width
from specmodel._version import __version__
from specmodel.acceptance import Acceptance, as_acceptance, warn_beyond
from specmodel.architectures import Architecture, load_model
from specmodel.defaults import drafter_of
from specmodel.drafters import Drafter
from specmodel.errors import (
    DomainError,
    ExtrapolationWarning,
    one_number,
    one_whole,
    real_array,
    whole_array,
)
from specmodel.hardware import Device, load_device
from specmodel.memory import memory
from specmodel.roofline import Execution, ExecutionOptions, critical_batch
from specmodel.speculation import mean_width, regime, round_time, tokens_per_round

if TYPE_CHECKING:
    import xarray as xr

VARIABLES = {
    "T_p": ("B L", "s", "plain decode step"),
    "T_v": ("B k L", "s", "verification pass"),
    "T_d": ("B k L", "s", "producing the drafts"),
    "T_h": ("B", "s", "a plain step besides its pass"),
    "T_o": ("B k", "s", "a round besides its passes"),
    "W": ("k", "token", "positions verified per sequence"),
    "G": ("k alpha", "token", "tokens committed per round, bonus included"),
    "S": ("B k L alpha", "1", "speedup over plain decoding"),
    "round_cost": ("B k L", "1", "round over plain step, (T_d + T_v + T_o) / (T_p + T_h)"),
    "regime": ("B k L", "1", "I: verification memory-bound, II: only decoding is, III: neither"),
    "B_p_star": ("L", "1", "batch at which decoding turns compute-bound"),
    "B_v_star": ("k L", "1", "batch at which verification turns compute-bound"),
    "k_star": ("B L alpha", "token", "best draft length among the k asked for, 0: off"),
    "W_star": ("B L alpha", "token", "best width"),
    "S_star": ("B L alpha", "1", "speedup at the best draft length"),
    "tokens_per_second": ("B k L alpha", "1/s", "tokens of all sequences together"),
    "memory_bytes": ("B k L", "B", "memory taken on the fullest of the target's devices"),
    "max_batch": ("k L", "1", "largest batch that fits on every device"),
    "fits": ("B k L", "1", "whether the batch fits on every device"),
}


def speculate(
    device: Device | str,
    target: Architecture | str,
    drafter: Drafter | str,
    acceptance: Acceptance | ArrayLike,
    *,
    B: ArrayLike,
    k: ArrayLike | range,
    L: ArrayLike = 0,
    T_h: float = 0.0,
    T_o: float = 0.0,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> xr.Dataset:
    """Predict rounds over every combination of B, k and L.

    Parameters
    ----------
    device, target : Device or str, Architecture or str
        Records, or what `load_device` and `load_model` take.
    drafter : Drafter or str
        A record, or a kind such as ``eagle3``; a draft model of the target's family is then
        chosen where the kind needs one.
    acceptance : Acceptance or array_like
        A record, or alpha. [-] A record with an axis of its own (`Geometric` of several alphas)
        adds a dimension ``alpha``.
    B, k, L : array_like
        Sequences [-], drafts [token], context [token]; one-dimensional or scalar. Scalars
        become scalar coordinates.
    T_h, T_o : float
        What a plain step and a round cost besides their passes. [s]
    execution : Execution, optional
        Or its fields as keywords: level, tp, kv_reread, expert_overlap, efficiency.

    Returns
    -------
    xarray.Dataset
        ``T_p T_v T_d T_h T_o W G S round_cost regime B_p_star B_v_star k_star W_star S_star
        tokens_per_second memory_bytes max_batch fits``, each with ``units``;
        ``attrs["basis"]`` says where the rates come from.

    Raises
    ------
    DomainError
        When an argument is out of range.

    Examples
    --------
    >>> import specmodel as sm
    >>> r = sm.speculate(
    ...     sm.load_device("h100"), sm.load_model("llama-3.1-8b"), sm.Eagle3(),
    ...     sm.Geometric(0.7), B=[1, 64], k=range(9), L=2048, level="ideal",
    ... )
    >>> r.S.dims, r.attrs["basis"]
    (('B', 'k'), 'datasheet')
    """
    import xarray as xr

    how = Execution.of(execution, options)
    device, target = load_device(device), load_model(target)
    drafter, acceptance = drafter_of(drafter, target), as_acceptance(acceptance)
    for name, value in (("T_h", T_h), ("T_o", T_o)):
        one_number(value, name, low=0, unit="s")
    axes = {
        "B": real_array(B, "batch", low=1),
        "k": whole_array(np.asarray(list(k)) if isinstance(k, range) else k, "k", unit="token"),
        "L": real_array(L, "context", low=0, unit="token"),
    }
    batch, drafts, context = _outer(*axes.values())
    times = round_time(
        device, target, drafter, B=batch, k=drafts, L=context, execution=how, T_h=T_h, T_o=T_o
    )
    G = np.atleast_2d(tokens_per_round(acceptance, drafter, drafts[0, :, 0]))  # alpha, k
    alphas = np.atleast_1d(getattr(acceptance, "alpha", np.nan))
    G = G.T[None, :, None, :]
    S = np.where(drafts[..., None] > 0, G / times.cost[..., None], 1.0)
    best = width.best_of(S, axes["k"].reshape(-1), axis=1)
    decode_star = critical_batch(device, target, L=context, execution=how)
    verify_star = critical_batch(
        device, target, W=mean_width(drafter, drafts), L=context, execution=how
    )
    values: dict[str, ArrayLike] = {
        "T_p": times.T_p,
        "T_v": times.T_v,
        "T_d": times.T_d,
        "T_h": times.T_h,
        "T_o": times.T_o,
        "round_cost": times.cost,
        "W": drafter.rows(drafts),
        "G": G,
        "S": S,
        "B_p_star": decode_star,
        "B_v_star": verify_star,
        "regime": regime(batch, verify_star, decode_star),
        "k_star": np.expand_dims(best.k, 1),
        "W_star": np.expand_dims(drafter.rows(best.k), 1),
        "S_star": np.expand_dims(best.S, 1),
        "tokens_per_second": batch[..., None] * S / (times.T_p + times.T_h)[..., None],
        **_memory(device, target, drafter, how, batch, drafts, context),
    }
    coords = {name: np.atleast_1d(axis) for name, axis in axes.items()}
    coords["k"], coords["alpha"] = coords["k"].astype(int), alphas
    sizes = {name: axis.size for name, axis in coords.items()}
    dataset = xr.Dataset(
        {name: _variable(name, array, sizes) for name, array in values.items()},
        coords=coords,
        attrs=_attrs(device, target, drafter, acceptance, how) | {"basis": times.basis},
    )
    if np.ndim(getattr(acceptance, "alpha", 0.0)) == 0:
        dataset = dataset.squeeze("alpha", drop=True)
    return dataset.squeeze([name for name, axis in axes.items() if axis.ndim == 0])


def best_width(
    device: Device | str,
    target: Architecture | str,
    drafter: Drafter | str,
    acceptance: Acceptance | ArrayLike,
    *,
    B: ArrayLike,
    L: ArrayLike = 0,
    k_max: int = 16,
    T_h: float = 0.0,
    T_o: float = 0.0,
    execution: Execution | None = None,
    **options: Unpack[ExecutionOptions],
) -> xr.Dataset:
    """Return the best draft length ``k``, width ``W`` and speedup ``S`` over B and L.

    k = 0 means off; then S = 1. Parameters as in `speculate`, scanning k from 0 to `k_max`.
    """
    acceptance = as_acceptance(acceptance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)
        r = speculate(
            device,
            target,
            drafter,
            acceptance,
            B=B,
            k=range(one_whole(k_max, "k_max", unit="token") + 1),
            L=L,
            T_h=T_h,
            T_o=T_o,
            execution=execution,
            **options,
        )
    warn_beyond(acceptance, int(r["k_star"].max()))
    best = r[["k_star", "W_star", "S_star"]]
    return best.rename(k_star="k", W_star="W", S_star="S")


def _memory(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    how: Execution,
    batch: NDArray[np.float64],
    drafts: NDArray[np.float64],
    context: NDArray[np.float64],
) -> dict[str, ArrayLike]:
    """Return what is taken and what fits; k = 0 is without the drafter."""
    on = drafts > 0
    plain, drafting = (
        memory(device, target, one, k=k, L=context, layout=how.layout, offload=how.offload)
        for one, k in ((None, 0), (drafter, drafts))
    )
    return {
        "memory_bytes": np.where(on, drafting.total(batch), plain.total(batch)),
        "max_batch": np.where(on, drafting.max_batch, plain.max_batch),
        "fits": np.where(on, drafting.fits(batch), plain.fits(batch)),
    }


def _outer(*axes: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Reshape each axis so that they broadcast against one another."""
    for axis in axes:
        if axis.ndim > 1 or not axis.size:
            raise DomainError("B, k and L must be scalars or one-dimensional, and not empty")
    return list(np.meshgrid(*axes, indexing="ij", sparse=True))


def _variable(name: str, value: ArrayLike, sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """Return an xarray variable over its own dimensions, from an array over B, k, L and alpha."""
    dims, units, long_name = VARIABLES[name]
    array = np.asarray(value)
    array = array.reshape(array.shape + (1,) * (len(sizes) - array.ndim)) if array.ndim else array
    own = dims.split()
    shape = [size if axis in own else 1 for axis, size in sizes.items()]
    kept = [size for axis, size in sizes.items() if axis in own]
    data = np.broadcast_to(array, shape).reshape(kept)
    return own, data, {"units": units, "long_name": long_name}


def _attrs(
    device: Device,
    target: Architecture,
    drafter: Drafter,
    acceptance: Acceptance,
    execution: Execution,
) -> dict[str, Any]:
    return {
        "device": device.name,
        "target": target.name,
        "drafter": drafter.kind,
        "acceptance": acceptance.label,
        "level": execution.level,
        "engine": execution.engine.name if execution.engine else "none",
        "tp": execution.tp,
        "kv_reread": execution.kv_reread,
        "expert_overlap": execution.expert_overlap,
        "hit_rate": drafter.hit_rate,
        "specmodel_version": __version__,
    }
