"""Reader of published kernel tables: one GPU, one serving engine, the rows a fit can use.

The layout is that of aiconfigurator-core 0.12.0 (Apache-2.0): a folder with ``gemm.parquet``,
``decode_attention.parquet``, ``decode_mla.parquet``, ``moe.parquet`` and ``allreduce.parquet``, or
the installed package. Times were taken under CUDA graphs.

Rows kept, and why
------------------
gemm
    m <= 512, n and k >= 1,024: the shapes of decoding and verification. L40S: weights of a sixth
    of the L2 cache and more, because smaller ones were read from it. B200 with vLLM in fp8: not
    m = 1, which is twice too slow, and no row 15% above the median of the five rows of its
    (n, k) that surround it in m: isolated hiccups of about 6 us.
attention
    A cache larger than 1.3 L2, since a smaller one was read from it; batches up to 512 and
    contexts from 128 tokens; not heads = kv_heads > 1, which are outliers. Beside them, to
    anchor the fixed time, caches below 0.02 L2 at contexts of 32, 128 and 512 tokens: errors are
    not told of these. An fp8 cache: heads of
    128, because its numbers do not transfer between head sizes. TensorRT-LLM on A100 implies more
    than the peak bandwidth: none.
mla
    A cache larger than 1.3 L2.
experts
    m <= 512, experts not spread over devices, touched weights larger than 1.3 L2. Models with
    squared-ReLU experts have two matrices instead of three (vLLM from 0.19 on times them so).
allreduce
    Kernels inside CUDA graphs; vectors up to 16 MiB, which is 1,024 rows of 8,192.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specmodel.errors import FitError, UnknownNameError, brief, did_you_mean
from specmodel.hardware import Device, load_device
from specmodel.tables import ANCHOR, NUMBERS, TEXTS, Table, features

if TYPE_CHECKING:
    import pandas as pd

FILES = {
    "gemm": "gemm.parquet",
    "attention": "decode_attention.parquet",
    "mla": "decode_mla.parquet",
    "experts": "moe.parquet",
    "allreduce": "allreduce.parquet",
}
"""File of each operator in a folder of published tables."""

PACKAGE = "aiconfigurator-core"
"""The package that carries the same tables."""

LICENCE = "aiconfigurator-core tables, Apache-2.0"

_COLD = 1.3  # times the L2 cache: what is larger was read from memory
_TINY = 0.02  # of the L2 cache: reading it takes no time, whether from there or from memory
_ANCHORS = (32, 128, 512)  # contexts [token]
_LEAST_CONTEXT = 128
_LARGEST_VECTOR = 16 * 2**20
_UNGATED = ((2688, 1856), (1024, 2688), (2048, 5120))  # Nemotron 3: (hidden or latent, width)
_FORMATS = {"bfloat16", "fp8"}


def is_published(path: str | Path) -> bool:
    """Return whether a path (or the package's name) is of this layout."""
    return str(path) == PACKAGE or Path(path).is_dir()


def device_of(label: str) -> Device | None:
    """Return the record of a table's GPU label (``h100_sxm``, ``b200_sxm``), where there is one."""
    for name in (label, label.removesuffix("_sxm")):
        try:
            return load_device(name)
        except UnknownNameError:
            continue
    return None


def read_published(
    path: str | Path, *, gpu: str, engine: str, device: Device | None = None
) -> Table:
    """Read the rows of one GPU and engine: the newest version, the kernel with most rows.

    Parameters
    ----------
    path : path
        A folder with some of `FILES`, or `PACKAGE`.
    gpu : str
        Label as the tables spell it.
    engine : str
        ``vllm``, ``sglang`` or ``trtllm``.
    device : Device, optional
        Its record, by default the one its label names; without one no row is dropped for having
        been read from a cache.

    Raises
    ------
    FitError
        When a file is missing or unreadable, or has no row of that GPU and engine.
    """
    device = device or device_of(gpu)
    parts: list[Table] = []
    seen: set[str] = set()
    seen_engines: set[str] = set()
    frames, checksum = _frames(path, gpu)
    for operator, frame in frames.items():
        seen |= set(map(str, frame["gpu"].unique()))
        mine = frame[(frame["gpu"] == gpu) & (frame["fw"] == engine)]
        seen_engines |= set(map(str, frame["fw"].unique()))
        if len(mine):
            parts += _READ[operator](mine, gpu, device)
    parts = [part for part in parts if len(part)]
    engines = ", ".join(sorted(seen_engines)) or "none"
    if not parts:
        hint = did_you_mean(gpu, seen) if gpu not in seen else ""
        raise FitError(
            f"{path}: no row of gpu {brief(gpu)} and engine {brief(engine)}{hint} "
            f"(engines: {engines})"
        )
    versions = sorted({str(part.source["engine"]) for part in parts})
    return Table(
        texts={key: np.concatenate([part.texts[key] for part in parts]) for key in TEXTS},
        numbers={key: np.concatenate([part.numbers[key] for part in parts]) for key in NUMBERS},
        lines=np.concatenate([part.lines for part in parts]),
        source={
            "table": Path(path).resolve().name,
            "sha256": checksum,
            "gpu": gpu,
            "engine": f"{engine} {', '.join(versions)}",
            "licence": LICENCE,
        },
    )


def labels(path: str | Path) -> tuple[tuple[str, str], ...]:
    """Return the GPUs and engines that a folder's GEMM table has."""
    frame = _parquet(Path(path) / FILES["gemm"])
    pairs = frame[["gpu", "fw"]].drop_duplicates()
    return tuple(sorted(zip(map(str, pairs["gpu"]), map(str, pairs["fw"]), strict=True)))


# -- files ---------------------------------------------------------------------------------------


def _frames(path: str | Path, gpu: str) -> tuple[dict[str, pd.DataFrame], str]:
    """Return the tables by operator, and one checksum of their files."""
    if str(path) == PACKAGE:
        return _package(gpu)
    folder = Path(path)
    found = {name: folder / file for name, file in FILES.items() if (folder / file).is_file()}
    if not found:
        raise FitError(f"{folder}: has none of {', '.join(FILES.values())}")
    return {operator: _parquet(file) for operator, file in found.items()}, _checksum(found.values())


def _checksum(files: Iterable[Path]) -> str:
    digest = sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _parquet(file: Path) -> pd.DataFrame:
    try:
        import pandas as pd

        return pd.read_parquet(file)
    except ImportError:
        raise FitError(
            f"{file}: reading it needs pandas and pyarrow: pip install 'specmodel[tables]'"
        ) from None
    except (OSError, ValueError) as error:
        raise FitError(f"{file}: cannot be read: {error}") from None


def _package(gpu: str) -> tuple[dict[str, pd.DataFrame], str]:
    """Return one GPU's tables from the installed package, in the columns of the folder."""
    from importlib.util import find_spec

    import pandas as pd

    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise FitError(f"{PACKAGE} is not installed: pip install 'specmodel[tables]'")
    root = Path(spec.origin).parent / "systems" / "data"
    if not (root / gpu).is_dir():
        known = [folder.name for folder in root.iterdir() if folder.is_dir()]
        raise FitError(f"{PACKAGE} has no gpu {brief(gpu)}{did_you_mean(gpu, known)}")
    frames: dict[str, pd.DataFrame] = {}
    files: list[Path] = []
    for operator, (folder, name, names) in _IN_PACKAGE.items():
        parts = []
        for file in sorted((root / gpu / folder).glob(f"*/*/{name}_perf.parquet")):
            files.append(file)
            version, engine = file.parent.name, file.parents[1].name
            part = _parquet(file).rename(columns=names)
            parts.append(part.assign(gpu=gpu, fw=engine, ver=version))
        if parts:
            frame = pd.concat(parts, ignore_index=True)
            frame["seconds"] = frame.pop("latency") / 1e3
            if operator == "attention":
                frame = frame[frame["window_size"] == 0] if "window_size" in frame else frame
                frame["kv_len"] = frame["isl"] + frame["step"]
            if operator == "allreduce":
                frame["bytes"] = 2 * frame["message_elements"]
            frames[operator] = frame
    return frames, _checksum(files)


_IN_PACKAGE: dict[str, tuple[str, str, dict[str, str]]] = {
    "gemm": ("gemm", "gemm", {"kernel_source": "kernel", "gemm_dtype": "dtype"}),
    "attention": (
        "attention",
        "generation_attention",
        {
            "kernel_source": "kernel",
            "kv_cache_dtype": "kv_dtype",
            "batch_size": "batch",
            "num_key_value_heads": "num_kv_heads",
        },
    ),
    "mla": ("mla", "generation_mla", {}),
    "experts": ("moe", "moe", {}),
    "allreduce": (
        "comm",
        "custom_allreduce",
        {"kernel_source": "kernel", "message_size": "message_elements"},
    ),
}


def _version(text: str) -> tuple[tuple[int, str], ...]:
    """Return a key that orders versions: 0.5.14 after 0.5.6.post2, 1.3.0rc20 after 1.3.0rc5."""
    parts = re.findall(r"\d+|[a-z]+", text.lower())
    keys = [(int(p), "") if p.isdigit() else (-1 if p == "rc" else 0, p) for p in parts]
    return (*keys, (0, ""))


def _newest(frame: pd.DataFrame, kernel: str) -> pd.DataFrame:
    """Return the rows of the newest version and, in it, of the kernel with most of them."""
    newest = max(map(str, frame["ver"].unique()), key=_version)
    mine = frame[frame["ver"] == newest]
    return mine[mine[kernel] == mine[kernel].value_counts().idxmax()]


# -- operators -----------------------------------------------------------------------------------


def _table(frame: pd.DataFrame, operator: str, kernel: str, **columns: Any) -> Table:
    """Return rows as a table; `columns` maps its columns to the frame's, arrays or one text."""
    n = len(frame)

    def column(name: str) -> Any:
        value = columns.get(name)
        if isinstance(value, str) and value in frame.columns:
            return frame[value].to_numpy()
        return value

    texts = {"operator": operator, "mode": "graph", "kernel": str(frame[kernel].iloc[0])}
    wide = {
        name: np.broadcast_to(np.asarray(texts.get(name, column(name) or ""), dtype=np.str_), (n,))
        if not isinstance(column(name), np.ndarray)
        else column(name).astype(np.str_)
        for name in TEXTS
    }
    numbers = {
        name: np.full(n, np.nan)
        if (value := column(name)) is None
        else np.broadcast_to(np.asarray(value, dtype=np.float64), (n,))
        for name in (*NUMBERS,)
        if name != "seconds"
    }
    numbers["seconds"] = frame["seconds"].to_numpy(dtype=np.float64)
    return Table(
        texts=wide,
        numbers=numbers,
        lines=frame.index.to_numpy(dtype=np.intp),
        source={"engine": str(frame["ver"].iloc[0])},
    )


def _gemm(frame: pd.DataFrame, gpu: str, device: Device | None) -> list[Table]:
    parts = []
    for dtype in sorted(_FORMATS & set(frame["dtype"])):
        mine = _newest(frame[frame["dtype"] == dtype], "kernel")
        mine = mine[(mine["m"] <= 512) & (mine["n"] >= 1024) & (mine["k"] >= 1024)]
        if gpu == "b200_sxm" and dtype == "fp8" and (mine["fw"] == "vllm").all():
            mine = _without_hiccups(mine[mine["m"] > 1])
        table = _table(mine, "gemm", "kernel", m="m", n="n", k="k", dtype=dtype)
        if gpu == "l40s" and device is not None and device.l2_cache is not None:
            weights = np.asarray(features(table, "gemm")["weight_bytes"])
            table = table.where(weights >= device.l2_cache / 6)
        parts.append(table)
    return parts


def _without_hiccups(frame: pd.DataFrame) -> pd.DataFrame:
    ordered = frame.sort_values(["n", "k", "m"])
    around = ordered.groupby(["n", "k"])["seconds"].transform(
        lambda seconds: seconds.rolling(5, center=True).median()
    )
    return ordered[~(ordered["seconds"] > 1.15 * around)]


def _attention(frame: pd.DataFrame, gpu: str, device: Device | None) -> list[Table]:
    parts = []
    if gpu.startswith("a100") and (frame["fw"] == "trtllm").all():
        return []
    for kv_dtype in sorted(_FORMATS & set(frame["kv_dtype"])):
        mine = _newest(frame[frame["kv_dtype"] == kv_dtype], "kernel")
        mine = mine[mine["batch"] <= 512]
        if kv_dtype == "fp8":
            mine = mine[mine["head_dim"] == 128]
        same = (mine["num_heads"] == mine["num_kv_heads"]) & (mine["num_kv_heads"] > 1)
        table = _table(
            mine[~same],
            "attention",
            "kernel",
            dtype="bfloat16",
            kv_dtype=kv_dtype,
            batch="batch",
            width=1,
            context="kv_len",
            heads="num_heads",
            kv_heads="num_kv_heads",
            head_dim="head_dim",
        )
        parts.append(_cold_or_tiny(table, features(table, "attention")["kv_bytes"], device))
    return parts


def _cold_or_tiny(table: Table, cache: NDArray[np.float64], device: Device | None) -> Table:
    """Keep caches that were read from memory, and as anchors a few of no size."""
    context = table.numbers["context"]
    if device is None or device.l2_cache is None:
        return table.where(context >= _LEAST_CONTEXT)
    cold = (cache > _COLD * device.l2_cache) & (context >= _LEAST_CONTEXT)
    tiny = (cache < _TINY * device.l2_cache) & np.isin(context, _ANCHORS)
    note = np.where(tiny, ANCHOR, table.texts["note"])
    return replace(table, texts={**table.texts, "note": note}).where(cold | tiny)


def _mla(frame: pd.DataFrame, gpu: str, device: Device | None) -> list[Table]:
    parts = []
    for kv_dtype in sorted(_FORMATS & set(frame["kv_cache_dtype"])):
        mine = _newest(frame[frame["kv_cache_dtype"] == kv_dtype], "kernel_source")
        mine = mine.drop_duplicates(["num_heads", "batch_size", "step"])
        table = _table(
            mine.assign(context=mine["isl"] + mine["step"]),
            "mla",
            "kernel_source",
            dtype="bfloat16",
            kv_dtype=kv_dtype,
            batch="batch_size",
            width=1,
            context="context",
            heads="num_heads",
        )
        parts.append(_cold(table, features(table, "mla")["kv_bytes"], device))
    return parts


def _experts(frame: pd.DataFrame, gpu: str, device: Device | None) -> list[Table]:
    parts = []
    for dtype in sorted((_FORMATS | {"fp8_block"}) & set(frame["moe_dtype"])):
        alone = frame[(frame["moe_dtype"] == dtype) & (frame["moe_ep_size"] == 1)]
        if not len(alone):
            continue
        mine = _newest(alone, "kernel_source")
        mine = mine[mine["num_tokens"] <= 512]
        shapes = zip(mine["hidden_size"], mine["inter_size"], strict=True)
        new = (mine["fw"] == "vllm").all() and _version(str(mine["ver"].iloc[0])) >= (
            (0, ""),
            (19, ""),
        )
        ungated = np.array([new and shape in _UNGATED for shape in shapes], dtype=np.bool_)
        notes = mine["distribution"].astype(str).to_numpy(dtype=np.str_)
        table = _table(
            mine,
            "experts",
            "kernel_source",
            dtype=dtype,
            m="num_tokens",
            n=mine["inter_size"].to_numpy() / mine["moe_tp_size"].to_numpy(),
            k="hidden_size",
            experts="num_experts",
            top_k="topk",
            note=np.where(ungated, np.char.add(notes, "; ungated"), notes),
        )
        f = features(table, "experts")
        parts.append(_cold(table, f["touched"] * f["weight_bytes"], device))
    return parts


def _all_reduce(frame: pd.DataFrame, gpu: str, device: Device | None) -> list[Table]:
    captured = frame[~frame["kernel"].str.contains("eager")]
    if not len(captured):
        return []
    mine = _newest(captured, "kernel")
    mine = mine[mine["bytes"] <= _LARGEST_VECTOR]
    table = _table(mine, "allreduce", "kernel", dtype="bfloat16", bytes="bytes", ranks="num_gpus")
    return [table]


def _cold(table: Table, moved: NDArray[np.float64], device: Device | None) -> Table:
    if device is None or device.l2_cache is None:
        return table
    return table.where(moved > _COLD * device.l2_cache)


_READ: Mapping[str, Callable[[pd.DataFrame, str, Device | None], list[Table]]] = {
    "gemm": _gemm,
    "attention": _attention,
    "mla": _mla,
    "experts": _experts,
    "allreduce": _all_reduce,
}
