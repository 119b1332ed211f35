"""User reports: a YAML list of cases, each a deployment with a few measured rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specmodel.errors import DomainError
from specmodel.files import read_text
from specmodel.validation.rows import Row
from specmodel.yaml_text import parse_yaml

_KINDS = (
    ("parallel_eagle", r"p-?eagle|parallel-token"),
    ("block_diffusion", r"dflash"),
    ("dspark_parallel", r"dspark"),
    ("eagle3", r"eagle-?3"),
    ("mtp", r"mtp|nextn"),
    ("eagle2", r"eagle-?2"),
    ("eagle", r"eagle"),
    ("ngram", r"n-?gram|prompt lookup"),
    ("medusa", r"medusa"),
    ("lstm_heads", r"mlp_speculator"),
    ("draft_model", r"draft model|assistant"),
)
"""Kinds of drafters by how reports spell them; the first that is found."""
_NOBODY = re.compile(r"not (stated|captured)|none|n/?a\b", re.IGNORECASE)


def read_cases(path: Path | str) -> list[Row]:
    """Return the measured rows of a file of user reports.

    Parameters
    ----------
    path : path
        A YAML list of cases with ``id, url, engine, version, gpu, n_gpus, parallel, target,
        draft_method, prompt_len, output_len`` and ``rows`` of ``k, batch_or_concurrency,
        mean_acceptance_length, baseline, sd, unit, speedup``; a row may say ``steps, topk,
        num_draft`` of a tree, ``head``, ``draft`` and ``gpu`` of its own.

    Raises
    ------
    DomainError
        When the file is missing or no such list.
    """
    file = Path(path)
    try:
        cases = parse_yaml(read_text(file))
    except DomainError:
        raise
    except ValueError as error:
        raise DomainError(f"{file}: {error}") from None
    if not isinstance(cases, list):
        raise DomainError(f"{file}: must be a list of cases")
    found: list[Row] = []
    for number, case in enumerate(cases, start=1):
        where = f"{file}: case {number}"
        if not isinstance(case, dict) or not isinstance(case.get("id"), str):
            raise DomainError(f"{where}: must be a mapping with an id")
        rows = case.get("rows") or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DomainError(f"{where}: rows must be a list of mappings")
        for i, row in enumerate(rows, start=1):
            if (
                (_number(row.get("topk")) or 0.0) > 1
                and row.get("num_draft")
                and "steps" not in row
            ):
                raise DomainError(f"{where}: row {i}: a tree needs steps")
            found.append(_row(case, row, i))
    ids = [row.id for row in found]
    if len(set(ids)) < len(ids):
        raise DomainError(f"{file}: two cases have the same id")
    return found


def _row(case: dict[str, Any], row: dict[str, Any], number: int) -> Row:
    methods = (row.get("head"), row.get("method"), case.get("draft_method"))
    engine = f"{_said(case, 'engine')} {_said(case, 'version')}".strip()
    year = re.search(r"20\d\d", engine)
    parallel = _said(row, "parallel") or _said(case, "parallel")
    tp = re.search(r"TP ?(\d+)", parallel, re.IGNORECASE)
    elsewhere = re.search(r"PP ?[2-9]|2 nodes", parallel, re.IGNORECASE)
    batch = _number(row.get("batch_or_concurrency"))
    baseline, sd = _rates(row, batch)
    speedup = _number(row.get("speedup"))
    if speedup is None and baseline and sd:
        speedup = sd / baseline
    tree = ""
    if (topk := _number(row.get("topk"))) is not None and topk > 1 and row.get("num_draft"):
        tree = f"topk {topk:g}, {row['num_draft']} draft tokens (incl. root), {row['steps']} steps"
    return Row(
        id=f"{case['id']}-{number}",
        url=_said(case, "url"),
        source=case["id"],
        hardware=(_said(row, "gpu") or _said(case, "gpu")).split(",")[0],
        n_gpus=_number(case.get("n_gpus")),
        tp=float(tp[1]) if tp and not elsewhere else None,
        engine=engine,
        year=float(year[0]) if year else None,
        target_model=_said(case, "target"),
        target_dtype=_said(row, "target_quant"),
        drafter_kind=next((kind for text in methods if (kind := _kind(str(text or "")))), ""),
        draft_model=_draft(case, row),
        k=0.0 if row.get("k") == 0 else _number(row.get("k")),
        tree=tree,
        parallel=parallel,
        batch=batch,
        context_len=_said(row, "context") or _said(case, "prompt_len"),
        output_len=_said(case, "output_len"),
        dataset=_said(row, "dataset"),
        tokens_per_step_G=_number(row.get("mean_acceptance_length")),
        baseline_throughput=baseline,
        sd_throughput=sd,
        throughput_unit="tok/s" if baseline else "",
        speedup=speedup,
        speedup_baseline="no_spec_same_engine" if speedup is not None else "",
    )


def _kind(method: str) -> str:
    return next((kind for kind, text in _KINDS if re.search(text, method, re.IGNORECASE)), "")


def _said(values: dict[str, Any], key: str) -> str:
    text = "" if values.get(key) is None else str(values[key])
    return "" if _NOBODY.match(text) else text


def _number(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 < value < 1e12 else None


def _rates(row: dict[str, Any], batch: float | None) -> tuple[float | None, float | None]:
    """Return tokens per second of the batch, plainly and with speculation."""
    unit, many = str(row.get("unit") or "").lower(), batch or 1.0

    def rate(value: float | None) -> float | None:
        if value is None:
            return None
        if unit.startswith("ms tpot"):
            return 1e3 * many / value
        if unit.startswith("tok/s"):
            each = unit.removeprefix("tok/s").strip(" /")
            if each.startswith(("user", "per request", "request")):
                return value * many
            return None if each.startswith(("gpu", "per gpu")) else value
        return None

    return rate(_number(row.get("baseline"))), rate(_number(row.get("sd")))


def _draft(case: dict[str, Any], row: dict[str, Any]) -> str:
    """Return the draft model that a report names, with the size that its row does."""
    text = re.sub(r"^.*?(draft model|assistant)\s*", "", _said(case, "draft_method"))
    own = _said(row, "draft")
    if own:
        return re.sub(r"[\d.]+B(/[\d.]+B)*", own, text.split("/")[0]) if text else own
    return text if re.search(r"draft model|assistant", _said(case, "draft_method")) else ""
