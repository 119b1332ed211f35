"""The forms of a sweep's file: Zarr, NetCDF, Parquet and CSV, each written block by block."""

from __future__ import annotations

import base64
import importlib
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specmodel._version import __version__
from specmodel.errors import DomainError
from specmodel.labelled import VARIABLES
from specmodel.sweeping.plan import INNER, REGIMES, Block, Sweep, dtype_of
from specmodel.sweeping.store import CONTENTS, contents

if TYPE_CHECKING:
    import xarray as xr

_ORIGIN = {"written_by": "specmodel sweep"}  # of every file with labelled axes

_AT_A_TIME = 50_000  # rows of text that are in memory

Blocks = Iterable[tuple[Block, Mapping[str, NDArray[Any]]]]
"""Blocks that could be evaluated, and their variables."""

Reasons = NDArray[np.object_]
"""Why each case could not be computed, over the axes of the cases; empty where it could."""


def check_installed(form: str) -> None:
    """Check that the packages are installed that a form needs.

    Raises
    ------
    DomainError
        When some are not.
    """
    missing = [name for name in _FORMS[form][1] if not _is_installed(name)]
    if missing:
        raise DomainError(
            f"a sweep to {form} needs {', '.join(missing)}: pip install 'specmodel[sweep]' brings "
            "them"
        )


def _is_installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def write(form: str, plan: Sweep, path: Path, blocks: Blocks, reasons: Reasons) -> None:
    """Write a sweep's file in a form, one of `FORMS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strings, which Zarr's third format has yet to fix
        _FORMS[form][0](plan, path, blocks, reasons)


# -- labelled axes: values of all cases in one array, NaN where a case was refused ----------------


def _labels(plan: Sweep, reasons: Reasons) -> xr.Dataset:
    """Return everything but the variables: coordinates, attributes, why cases are missing."""
    import xarray as xr

    coords: dict[str, Any] = {name: np.asarray(labels) for name, labels in plan.axes.items()}
    coords |= {"B": plan.B, "k": plan.k.astype(int), "L": plan.L}
    if plan.alpha:
        coords["alpha"] = np.asarray(plan.alpha)
    longest = max((len(text) for text in reasons.reshape(-1)), default=0)
    why = reasons.astype(f"<U{max(longest, 1)}")
    data = xr.Dataset(
        {"refused": (list(plan.axes), why, {"long_name": "why the case could not be computed"})},
        coords=coords,
        attrs={"specmodel_version": __version__, **_ORIGIN, **plan.attrs},
    )
    for name, units in (("B", "1"), ("k", "token"), ("L", "token")):
        data[name].attrs["units"] = units
    return data


def _attributes(variable: str) -> dict[str, Any]:
    _, units, long_name = VARIABLES[variable]
    attributes: dict[str, Any] = {"units": units, "long_name": long_name}
    if variable == "regime":
        attributes |= {"flag_values": [1, 2, 3], "flag_meanings": " ".join(REGIMES)}
    return attributes


def _where(plan: Sweep, block: Block, variable: str) -> tuple[int | slice, ...]:
    spans = block.spans
    return (*block.outer, *(spans.get(d, slice(None)) for d in plan.dims(variable)))


def _write_netcdf(plan: Sweep, path: Path, blocks: Blocks, reasons: Reasons) -> None:
    import h5netcdf

    _labels(plan, reasons).to_netcdf(path, engine="h5netcdf")
    with h5netcdf.File(path, "a") as file:
        for name in plan.variables:
            dims, kind = (*plan.axes, *plan.dims(name)), dtype_of(name)
            fill = np.nan if kind is np.float64 else None
            variable = file.create_variable(name, dims, kind, fillvalue=fill)
            variable.attrs.update(_attributes(name))
        for block, values in blocks:
            for name, array in values.items():
                file[name][_where(plan, block, name)] = array


def _write_zarr(plan: Sweep, path: Path, blocks: Blocks, reasons: Reasons) -> None:
    import zarr

    _labels(plan, reasons).to_zarr(path, consolidated=False, zarr_format=3)
    group = zarr.open_group(path, mode="r+")
    sizes, cut = plan.sizes, dict.fromkeys(plan.axes, 1) | dict(zip("BL", plan.block, strict=True))
    fill = {"_FillValue": base64.b64encode(struct.pack("<d", np.nan)).decode()}  # as xarray's
    for name in plan.variables:
        dims, kind = (*plan.axes, *plan.dims(name)), dtype_of(name)
        group.create_array(
            name,
            shape=tuple(sizes[d] for d in dims),
            chunks=tuple(cut.get(d, sizes[d]) for d in dims),
            dtype=kind,
            fill_value=np.nan if kind is np.float64 else 0,
            dimension_names=dims,
            attributes=_attributes(name) | (fill if kind is np.float64 else {}),
        )
    arrays: dict[str, Any] = {name: group[name] for name in plan.variables}
    for block, values in blocks:
        for name, array in values.items():
            arrays[name][_where(plan, block, name)] = array
    group.attrs[CONTENTS] = contents(path, group.attrs.asdict())
    zarr.consolidate_metadata(path)


# -- rows: one a point; refused cases have none ---------------------------------------------------


def _columns(plan: Sweep) -> list[str]:
    return [*plan.axes, *(d for d in INNER if d in plan.sizes), *plan.variables]


def _grid(
    plan: Sweep, block: Block, values: Mapping[str, NDArray[Any]]
) -> tuple[tuple[int, ...], dict[str, NDArray[Any]]]:
    """Return the shape of a block's grid, and its columns, each broadcasting to that shape."""
    alpha = np.asarray(plan.alpha)
    axes = {"B": block.B, "k": block.k.astype(int), "L": block.L, "alpha": alpha}
    inner = [d for d in INNER if d in plan.sizes]
    columns: dict[str, tuple[NDArray[Any], tuple[str, ...]]] = {d: (axes[d], (d,)) for d in inner}
    columns |= {name: (values[name], plan.dims(name)) for name in plan.variables}
    return tuple(axes[d].size for d in inner), {
        name: array.reshape([axes[d].size if d in dims else 1 for d in inner])
        for name, (array, dims) in columns.items()
    }


def _write_parquet(plan: Sweep, path: Path, blocks: Blocks, reasons: Reasons) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    writer: Any = None
    for block, values in blocks:
        if reasons[block.outer]:
            continue
        shape, columns = _grid(plan, block, values)
        arrays = []
        for labels, at in zip(plan.axes.values(), block.outer, strict=True):
            label = np.asarray(labels)[at].item()
            kind = pa.large_string() if isinstance(label, str) else None
            arrays.append(pa.repeat(pa.scalar(label, kind), int(np.prod(shape))))
        for array in columns.values():
            whole = np.broadcast_to(array, shape).reshape(-1)
            arrays.append(pa.array(whole, from_pandas=True))  # NaN is a missing value
        table = pa.table(dict(zip(_columns(plan), arrays, strict=True)))
        if writer is None:
            writer = pa.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def _write_csv(plan: Sweep, path: Path, blocks: Blocks, reasons: Reasons) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(map(_quoted, _columns(plan))) + "\n")
        for block, values in blocks:
            if not reasons[block.outer]:
                file.writelines(_lines(plan, block, values))


def _lines(plan: Sweep, block: Block, values: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """Yield the rows of a block as text, those of one number of sequences at a time.

    What these rows begin with (the case, the number of sequences) is joined once, and so is what
    the rows of every number of sequences have in common (drafts, context, alpha).
    """
    shape, columns = _grid(plan, block, values)
    across = int(np.prod(shape[1:]))
    inner = [_spread(_texts(columns.pop(d)), (1, *shape[1:])) for d in INNER[1:] if d in columns]
    axes = np.array(list(map(",".join, zip(*(one[0] for one in inner), strict=True))), object)
    batches = columns.pop("B").reshape(-1)
    case = "".join(
        _quoted(np.asarray(labels)[at].item()) + ","
        for labels, at in zip(plan.axes.values(), block.outer, strict=True)
    )
    step = max(1, _AT_A_TIME // across)
    for start in range(0, batches.size, step):
        part = slice(start, start + step)
        now = batches[part]
        texts = [
            _spread(_texts(one if len(one) == 1 else one[part]), (now.size, *shape[1:]))
            for one in columns.values()
        ]
        for row, batch in enumerate(_texts(now)):
            begin = f"{case}{batch},"
            lines = map(",".join, zip(axes, *(one[row] for one in texts), strict=True))
            yield begin + f"\n{begin}".join(lines) + "\n"


def _texts(values: NDArray[Any]) -> NDArray[np.object_]:
    """Return numbers as text: the shortest that reads back as the same; NaN is empty."""
    text = repr(values.reshape(-1).tolist())[1:-1] + ", "
    text = text.replace(".0, ", ", ").replace("nan, ", ", ")
    return np.array(text[:-2].split(", "), dtype=object).reshape(values.shape)


def _spread(texts: NDArray[np.object_], shape: tuple[int, ...]) -> list[list[str]]:
    """Return texts broadcast to a shape, as one list for each index along its first axis."""
    spread: list[list[str]] = np.broadcast_to(texts, shape).reshape(shape[0], -1).tolist()
    return spread


def _quoted(label: Any) -> str:
    """Return a label as a cell: text in quotes, a number as those of the columns."""
    if isinstance(label, str):
        return '"' + label.replace('"', '""') + '"'
    return str(_texts(np.asarray(label)).item())


_FORMS: dict[str, tuple[Callable[[Sweep, Path, Blocks, Reasons], None], tuple[str, ...]]] = {
    ".zarr": (_write_zarr, ("zarr",)),
    ".nc": (_write_netcdf, ("h5netcdf", "h5py")),
    ".parquet": (_write_parquet, ("pyarrow",)),
    ".csv": (_write_csv, ()),
}

FORMS = tuple(_FORMS)
"""Endings of the files that a sweep writes."""
