"""The prediction beside a measurement, from its acceptance but none of its times."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import specmodel.drafters as model
from calibrate.engine.cache import Cache
from calibrate.engine.config import DecoderConfig
from calibrate.engine.decoder import Decoder
from calibrate.profile import fit_and_write
from calibrate.run import Settings as CalibrationSettings
from calibrate.run import measure as calibrate
from calibrate.speculate.drafters import DraftModel, Forced, NGram
from calibrate.speculate.head_drafters import FeatureDrafter, Medusa
from calibrate.speculate.heads import MedusaHeads
from calibrate.speculate.inputs import Chosen
from calibrate.speculate.lookahead import Lookahead
from calibrate.speculate.loop import speculate
from calibrate.speculate.proposals import Drafter, Proposal, Uniform
from calibrate.speculate.summary import times_record
from calibrate.speculate.trees import Tree
from specmodel.acceptance import PerPosition
from specmodel.errors import ExtrapolationWarning
from specmodel.hardware import Device
from specmodel.law import Transform
from specmodel.report import Setup, predict
from specmodel.roofline import Execution, pass_time

_CALIBRATION = 60.0  # seconds of measuring where no profile is given
_THIN = 16  # elements of a pass that does next to nothing
_ROUNDS = 12  # of the loop without passes
_CACHES = 256 << 20  # bytes: no device's caches hold more


class Silent(Decoder):
    """A decoder whose passes compute nothing: what the loop costs by itself.

    Parameters
    ----------
    vocab, rows : int
        Tokens, and rows of logits that one pass asks for at most.
    layers : int
        Of passes that run all the same, 16 elements wide: what a pass costs besides its work; 0:
        they do not run.
    reads : int
        Bytes that a pass reads, so that it leaves caches to the loop as a real one does.
    dtype, device : as torch takes them
    """

    def __init__(
        self, vocab: int, rows: int, *, layers: int = 0, reads: int = 0, dtype: Any, device: Any
    ) -> None:
        sizes: dict[str, Any] = {"hidden": _THIN, "heads": 1, "kv_heads": 1}
        kind: dict[str, Any] = {"model_type": "llama", "norm_eps": 1e-5, "context": 1 << 40}
        config = DecoderConfig(
            **sizes,
            **kind,
            layers=max(layers, 1),
            head_dim=_THIN,
            intermediate=_THIN,
            vocab=vocab,
            tied=True,
        )
        super().__init__(config, dtype=dtype, device=device)
        self.randomise()
        self.runs = bool(layers)
        self.random = torch.randn(rows, vocab, dtype=dtype, device=device)
        self.read = torch.zeros(reads // 4, dtype=torch.float32, device=device)

    def hidden(self, tokens: Tensor, cache: Cache | None = None, **options: Any) -> Tensor:
        """Return features of no meaning."""
        self.read.sum()
        if self.runs:
            return super().hidden(tokens, cache, **options)
        return torch.zeros(*tokens.shape, _THIN, dtype=self.dtype, device=self.device)

    def logits(self, features: Tensor) -> Tensor:
        """Return the first random rows."""
        shape = features.shape[:-1]
        return self.random[: shape.numel()].view(*shape, -1)


class _SilentHeads(MedusaHeads):
    """Medusa heads that take no time."""

    def __init__(self, silent: Silent, count: int) -> None:
        super().__init__(_THIN, 1, count, dtype=silent.dtype, device=silent.device)
        self.silent = silent

    def forward(self, features: Tensor, count: int) -> Tensor:
        """Return random rows."""
        return self.silent.logits(features.expand(count, *features.shape))


class _Hits(NGram):
    """Prompt lookup that looks up, and then finds what it is told to."""

    def __init__(self, real: NGram, hit: float) -> None:
        super().__init__(longest=real.longest, shortest=real.shortest)
        self.hit = hit

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return k drafts for a share of the sequences."""
        found = super().propose(tree, transform, uniform)
        some = uniform(len(found.tokens)) < self.hit
        return found._replace(lengths=torch.where(some, tree.k, 0))


def loop_times(
    chosen: Chosen,
    prompts: Sequence[Sequence[int]],
    tree: Tree,
    transform: Transform,
    hit: float,
) -> dict[str, float]:
    """Time the loop with passes that compute nothing: sampling, verdicts, bookkeeping. [s]

    To T_d of a draft model or a head comes what its first pass takes longer because the target's
    has emptied the caches, measured on one 16 elements wide. Prompt lookup finds something in
    the share `hit` of its rounds, as it did when it was measured.

    Returns
    -------
    dict
        ``T_h`` of a plain step, ``T_d`` and ``T_o`` of a round.
    """
    target, real = chosen.target, chosen.drafter
    if isinstance(real, Forced):
        real = real.drafter
    vocab, rows = target.config.vocab, len(prompts) * (1 + real.rows(tree))
    kind = {"dtype": target.dtype, "device": target.device}
    size = target.config.parameters * target.dtype.itemsize
    warm, cold = (Silent(vocab, rows, reads=n, **kind) for n in (0, min(size, _CACHES)))

    def times(target: Silent, drafter: Drafter) -> dict[str, float]:
        if isinstance(chosen.drafter, Forced):
            drafter = Forced(drafter, chosen.drafter.rates.tolist())
        how: dict[str, Any] = {"transform": transform, "eos": ()}
        plain = speculate(target, None, prompts, k=0, max_new_tokens=_ROUNDS, **how)
        new = _ROUNDS * (tree.k + 1)
        fast = speculate(target, drafter, prompts, k=tree, max_new_tokens=new, **how)
        return times_record(plain.rounds[2:], fast.rounds[2:] or fast.rounds)

    if isinstance(real, NGram):
        found = times(cold, _Hits(real, hit))
    elif isinstance(real, Lookahead):
        found = times(cold, real)
    elif isinstance(real, Medusa):
        found = times(cold, Medusa(_SilentHeads(warm, tree.k)))
    else:
        found = times(cold, DraftModel(warm))
    if isinstance(real, DraftModel | FeatureDrafter):
        layers = real.decoder.config.layers if isinstance(real, DraftModel) else 1
        thin = DraftModel(Silent(vocab, rows, layers=layers, **kind))
        found["T_d"] = times(warm, DraftModel(warm))["T_d"]
        found["T_d"] += times(cold, thin)["T_d"] - times(warm, thin)["T_d"]
    return {name: found[name] for name in ("T_h", "T_d", "T_o")}


def predicted(
    device: Device, chosen: Chosen, point: dict[str, Any], tree: Tree, loop: dict[str, float]
) -> dict[str, Any]:
    """Return what the model says of a point, under the names of what was measured."""
    hit = point["acceptance"]["hit_rate"]
    drafter = chosen.price(hit)
    if not tree.is_chain:
        drafter = model.DraftTree(drafter=drafter, widths=tuple(map(len, tree.levels)))
    share = 1.0 if drafter.hit_rate == hit else hit  # of rounds, where the drafter has none
    rates = [share * rate for rate in point["acceptance"]["per_position"]]
    setup = Setup(
        device=device,
        target=chosen.shape,
        drafter=drafter,
        acceptance=PerPosition(rates),
        execution=Execution(),
        batches=(point["batch"],),
        contexts=(point["context"],),
        k=point["k"],
        k_max=point["k"],
        T_h=loop["T_h"],
        T_o=loop["T_o"] + loop["T_d"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)  # they are in the result
        result = predict(setup)
    (found,) = result.points
    names = ("G", "T_p", "T_v", "T_h", "S", "S_low", "S_high")
    values = {name: found[name] for name in names if name in found}
    if isinstance(drafter, model.NGram):
        values |= _padded(setup, point, values, found["T_d"] + loop["T_d"] + loop["T_o"])
    return {
        **values,
        "T_d": found["T_d"] + loop["T_d"],
        "T_o": loop["T_o"],
        "basis": setup.basis,
        "warnings": list(result.warnings),
    }


def _padded(
    setup: Setup, point: dict[str, Any], values: dict[str, float], others: float
) -> dict[str, float]:
    """Return T_v and S of passes that are as wide as the longest draft of the batch.

    The model prices each sequence's own rows; what `point` tells of widths is no time.
    """
    T_v = sum(
        share
        * float(
            pass_time(
                setup.device,
                setup.target,
                B=point["batch"],
                W=1 + drafts,
                L=point["context"],
                execution=setup.execution,
            ).T
        )
        for drafts, share in point["pass_widths"].items()
    )
    ratio = (values["T_v"] + others) / (T_v + others)
    speeds = ("S", "S_low", "S_high")  # the last two unknown on a device nobody measured
    scaled = {x: v * ratio for x, v in values.items() if x in speeds and v is not None}
    return {"T_v": T_v, **scaled}


def calibrated(device: str, dtype: str, budget: float = _CALIBRATION) -> Device:
    """Return the device as it measures itself now, for `budget` seconds."""
    with TemporaryDirectory() as folder:
        table = Path(folder, "device.csv")
        settings = CalibrationSettings(device=device, table=table, budget=budget, dtypes=(dtype,))
        calibrate(settings)
        found, *_ = fit_and_write(table, table.with_suffix(".yaml"))
    return found
