"""Whatever an argument is, a public function or record takes it or says what it must be."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.drafters import DraftTree
from specmodel.width import best_affine_width, best_policy

ODD = (
    None,
    "a string",
    [1, 2],
    [[1], [1, 2]],
    [],
    np.array([1, 2]),
    np.array(["a", "b"]),
    2.5,
    2.0,
    True,
    -1,
    float("nan"),
    float("inf"),
    1j,
    {},
    object(),
    sm.Geometric,
)
LLAMA, H100 = sm.load_model("llama-3.1-8b"), sm.load_device("h100")
SMALL, LINK = sm.load_model("llama-3.2-1b"), sm.Link(1e-6, 1e11)
HALF = [0.5, 0.5]
_RECORDS = {"device": H100, "target": LLAMA, "drafter": sm.Eagle3(), "acceptance": 0.7}
_OPTIONS = {
    name: getattr(sm.Execution(), name) for name in inspect.signature(sm.Execution).parameters
}
_DRAFTER = {"host_time": 0.0, "tp": None, "device": H100, "link": LINK, "overlapped": False}
_PASS = {"device": H100, "architecture": LLAMA, "W": 1, "L": 0, "execution": None}
_TIMES = {"T_h": 0.0, "T_o": 0.0, "execution": None}
_DEVICE = {name: getattr(H100, name) for name in inspect.signature(sm.Device).parameters}


def _drafted(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **given: sm.speculate(**{**_RECORDS, "drafter": make(**given)}, B=2, k=[0, 2])


def _accepted(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **given: (record := make(**given)).label + str(record.tokens([0, 1, 2]))


def _sent(**given: Any) -> object:
    return sm.Link(**given).time(1e6)


def _run(**given: Any) -> object:
    return sm.pass_time(H100, LLAMA, B=[1, 2], execution=sm.Execution(**given))


def _assumed(**given: Any) -> object:
    return _run(efficiency=sm.Efficiency(**given), calibrated=False)


def _on(**given: Any) -> object:
    return sm.pass_time(sm.Device(**given), LLAMA, B=1)


EFFICIENCY = {"t_op": 1e-6, "eta_m": 0.9, "eta_f": 0.9, "p": 2.5, "t_link": 1e-6, "eta_link": 0.5}
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "speculate": (sm.speculate, {**_RECORDS, "B": 1, "k": 2, "L": 0, **_TIMES}),
    "best_width": (sm.best_width, {**_RECORDS, "B": 1, "L": 0, "k_max": 3, **_TIMES}),
    "schedule": (
        sm.schedule,
        {**_RECORDS, "L": 0, "max_batch": 4, "k_max": 3, **_TIMES}
        | {"k": None, "fits": None, "keep": 0.0, "errors": None},
    ),
    "pass_time": (sm.pass_time, {**_PASS, "B": 1, "head_rows": None, "fuse": True}),
    "options": (lambda **given: sm.pass_time(H100, LLAMA, B=1, **given), _OPTIONS),
    "critical_batch": (sm.critical_batch, _PASS),
    "load_device": (sm.load_device, {"device": "h100"}),
    "load_model": (sm.load_model, {"model": "llama-3.1-8b"}),
    "Execution": (_run, _OPTIONS),
    "Efficiency": (_assumed, {**EFFICIENCY, "basis": "a guess"}),
    "Link": (_sent, {"latency": 1e-6, "bandwidth": 1e11}),
    "Device": (_on, _DEVICE),
    "Geometric": (_accepted(sm.Geometric), {"alpha": 0.7}),
    "PerPosition": (_accepted(sm.PerPosition), {"values": [0.7, 0.5], "conditional": False}),
    "MeanLength": (_accepted(sm.MeanLength), {"length": 2.2, "k": 3, "includes_bonus": True}),
    "Histogram": (_accepted(sm.Histogram), {"counts": [1, 2, 3]}),
    "BetaMixture": (_accepted(sm.BetaMixture), {"x": 7.0, "y": 3.0, "over": "rounds"}),
    "DraftModel": (_drafted(sm.DraftModel), {"architecture": SMALL, **_DRAFTER}),
    "Parallel": (_drafted(sm.Parallel), {"architecture": SMALL, **_DRAFTER}),
    "BlockDiffusion": (_drafted(sm.BlockDiffusion), {"architecture": SMALL, **_DRAFTER}),
    **{
        record.__name__: (_drafted(record), {"architecture": None, **_DRAFTER})
        for record in (sm.Eagle, sm.Eagle3, sm.MTP)
    },
    "Medusa": (_drafted(sm.Medusa), _DRAFTER),
    "NGram": (_drafted(sm.NGram), {"hit": 0.5, **_DRAFTER}),
    "SelfSpeculative": (_drafted(sm.SelfSpeculative), {"layer_fraction": 0.25, **_DRAFTER}),
    "SparseKV": (_drafted(sm.SparseKV), {"budget": 64, **_DRAFTER}),
    "Lookahead": (_drafted(sm.Lookahead), {"window": 2, "guesses": 2, **_DRAFTER}),
    "surprisal": (sm.information.surprisal, {"p": HALF}),
    "surprisal_from_log": (sm.information.surprisal_from_log, {"log_p": [-0.5, -1.0]}),
    "entropy": (sm.information.entropy, {"p": HALF}),
    "lossy_typical": (sm.lossy.lossy_typical, {"p": HALF, "epsilon": 0.1, "delta": 0.1}),
    "lossy_relaxed": (sm.lossy.lossy_relaxed, {"p": HALF, "top": 1, "delta": 0.1}),
    "lossy_alpha": (sm.lossy.lossy_alpha, {"accepted": [True, False], "q": HALF}),
    "lossy_output": (sm.lossy.lossy_output, {"accepted": [True, False], "p": HALF, "q": HALF}),
}
EACH = [(name, parameter) for name, (_, given) in CASES.items() for parameter in given]


@pytest.mark.parametrize(("name", "parameter"), EACH)
def test_any_argument_is_taken_or_refused_by_name(name: str, parameter: str) -> None:
    function, given = CASES[name]
    for odd in ODD:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sm.ExtrapolationWarning)
            try:
                function(**{**given, parameter: odd})
            except sm.SpecmodelError:
                continue
            except Exception as error:
                error.add_note(f"{name}({parameter}={odd!r})")
                raise


@pytest.mark.parametrize("name", sorted(set(CASES) - {"BlockDiffusion", "MTP"}))  # need their heads
def test_the_arguments_around_the_odd_one_are_good(name: str) -> None:
    function, given = CASES[name]
    assert function(**given) is not None


@pytest.mark.parametrize("odd", ["h100", 2.5, 1, [1], {}, H100, sm.Execution])
def test_execution_is_a_record(odd: Any) -> None:
    calls: tuple[Callable[..., Any], ...] = (
        lambda how: sm.pass_time(H100, LLAMA, B=1, execution=how),
        lambda how: sm.critical_batch(H100, LLAMA, execution=how),
        lambda how: sm.speculate(**_RECORDS, B=1, k=1, execution=how),
        lambda how: sm.best_width(**_RECORDS, B=1, execution=how),
        lambda how: sm.schedule(**_RECORDS, max_batch=2, execution=how),
    )
    for call in calls:
        with pytest.raises(sm.DomainError, match=r"execution must be a record such as Execution"):
            call(odd)
    with pytest.raises(TypeError, match="give execution or tp, not both"):
        sm.critical_batch(H100, LLAMA, execution=sm.Execution(), tp=2)


def _schedule(**given: Any) -> object:
    return sm.schedule(**{**_RECORDS, "max_batch": 4, "k_max": 2, **given})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sm.Link(1e-6, [1, 2]), "link bandwidth must be one number; got [1, 2]"),
        (lambda: sm.Link(1e-6, 0), "link bandwidth must be > 0 B/s and finite; got 0"),
        (lambda: sm.Link(-1, 1), "link latency must be >= 0 s; got -1"),
        (lambda: sm.MeanLength([1, 2], k=3), "acceptance length must be one number; got [1, 2]"),
        (lambda: sm.MeanLength(2, k=True), "k must be one number; got True"),
        (lambda: sm.MeanLength(2, 3, 1), "includes_bonus must be True or False; got 1"),
        (lambda: sm.BetaMixture([1, 2], 3), "x must be one number; got [1, 2]"),
        (lambda: sm.BetaMixture(7, np.inf), "y must be > 0 and finite; got inf"),
        (lambda: sm.BetaMixture(7, 3, "round"), "got 'round'; did you mean 'rounds'?"),
        (lambda: sm.Geometric([]), "alpha must be a number or a list of at least one; got []"),
        (lambda: sm.Execution(tp=[1, 2]), "tp must be one number; got [1, 2]"),
        (lambda: sm.Execution(tp=1.5), "tp must be a whole number; got 1.5"),
        (lambda: sm.Execution(kv_reread=[0]), "kv_reread must be one number; got [0]"),
        (lambda: sm.Execution(level=[1]), "level must be operators or ideal; got [1]"),
        (lambda: sm.Execution(calibrated=0.5), "calibrated must be True or False; got 0.5"),
        (lambda: sm.Execution(efficiency=0.5), "efficiency must be an Efficiency; got 0.5"),
        (lambda: sm.Execution(network=5), "network must be a Link or None; got 5"),
        (
            lambda: sm.Efficiency(**{**EFFICIENCY, "eta_m": [0.5], "basis": ""}),
            "eta_m must be one number; got [0.5]",
        ),
        (
            lambda: sm.Efficiency(**{**EFFICIENCY, "eta_f": 0, "basis": ""}),
            "eta_f must be > 0 and at most 1; got 0",
        ),
        (lambda: sm.Eagle3(overlapped=np.array([1])), "overlapped must be True or False"),
        (lambda: sm.Eagle3(host_time=[0]), "host time must be one number; got [0]"),
        (lambda: sm.Eagle3(tp=[2]), "the drafter's tp must be one number; got [2]"),
        (lambda: sm.Eagle3(device=H100, link=5), "the drafter's link must be a Link or None"),
        (lambda: sm.DraftModel(None), "model must be a name, a file or an Architecture; got None"),
        (
            lambda: sm.Device(**{**_DEVICE, "peak_flops": {}}),
            "must name at least one dtype; got {}",
        ),
        (
            lambda: sm.Device(**{**_DEVICE, "memory_bandwidth": 0}),
            "memory_bandwidth must be > 0 and finite; got 0",
        ),
        (lambda: _schedule(max_batch=[1, 2]), "max_batch must be one number; got [1, 2]"),
        (lambda: _schedule(k_max=[1, 2]), "k_max must be one number; got [1, 2]"),
        (lambda: _schedule(T_h=[1, 2]), "T_h must be one number; got [1, 2]"),
        (lambda: _schedule(L=[1, 2]), "context must be one number; got [1, 2]"),
        (lambda: _schedule(errors=0.1), "errors must be a function or None; got 0.1"),
        (lambda: _schedule(fits=4), "fits must be a function or None; got 4"),
        (lambda: _schedule(fits=lambda k: "4"), "fits(1) must be one number; got '4'"),
        (lambda: _schedule(acceptance=[0.5, 0.7]), "must have one alpha; got 2 values of alpha"),
        (lambda: _schedule(acceptance=1.3), "alpha must be in [0, 1]; got 1.3"),
        (lambda: _schedule(acceptance=H100), "acceptance must be alpha or a record"),
        (
            lambda: sm.pass_time(H100, LLAMA, B=[1, 2], L=[1, 2, 3]),
            "arrays must have shapes that broadcast; got B (2,), L (3,)",
        ),
        (lambda: sm.pass_time(H100, LLAMA, B=1, fuse=2), "fuse must be True or False; got 2"),
        (lambda: DraftTree("eagle", (2, 4)), "drafter must be a record such as Eagle3()"),
        (lambda: DraftTree(sm.Eagle3(), 4), "widths must be a list, one for each depth; got 4"),
        (lambda: best_policy(0.7, 1, lambda k: k + 1), "shares must be as many as alphas"),
        (lambda: best_policy([0.7], [1], np.exp, k_max=[2]), "k_max must be one number; got [2]"),
        (lambda: best_affine_width(0.7, 1, 1, low=0), "segment must satisfy 1 <= low <= high"),
        (lambda: sm.lossy.lossy_relaxed(HALF, top=[1], delta=0), "top must be one number; got [1]"),
    ],
)
def test_messages(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(sm.SpecmodelError, match=re.escape(message)):
        call()


def test_a_schedule_takes_names_and_alpha() -> None:
    named = sm.schedule("h100", "llama-3.1-8b", "eagle3", 0.7, max_batch=32)
    assert named == sm.schedule(H100, LLAMA, sm.Eagle3(), sm.Geometric(0.7), max_batch=32)


def test_whole_numbers_are_kept_as_such() -> None:
    how = sm.Execution(tp=2.0, pp=np.int64(2), kv_reread=np.float64(0.5))
    assert how == sm.Execution(tp=2, pp=2, kv_reread=0.5)
    assert [type(x) for x in (how.tp, how.pp)] == [int, int]
    assert sm.MeanLength(2.2, k=3.0).label.startswith("acceptance length 2.2 at k = 3 ")
