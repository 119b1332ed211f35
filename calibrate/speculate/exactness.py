"""Whether greedy speculative texts are plain decoding's, and by how little they miss it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from calibrate.engine.decoder import Decoder
from specmodel.law import Transform


@torch.inference_mode()  # type: ignore[untyped-decorator]
def gaps(
    target: Decoder,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    fast: Sequence[Sequence[int]],
    transform: Transform | None = None,
) -> list[float]:
    """Return, for each text that differs, how far apart the two tokens' logits are.

    One row and k + 1 rows of the same matrix product round differently, so that where two
    tokens are as good as equal the choice between them is not the text's. Texts that go on after
    such a place are different ones; only the first difference counts.

    Parameters
    ----------
    target : Decoder
    prompts, plain, fast : sequence of token sequences
        What was continued, by plain decoding and speculatively.
    transform : Transform, optional
        Of both; its repetition penalty counts here.

    Returns
    -------
    list of float
        Logit of plain decoding's token minus that of the other, at the first difference, in one
        pass over the common text.
    """
    penalty = 1.0 if transform is None else transform.repetition_penalty
    how, found = Transform(repetition_penalty=penalty), []
    for prompt, one, other in zip(prompts, plain, fast, strict=True):
        if list(one) == list(other):
            continue
        same = next(
            i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b
        )  # neither is the other's beginning: both are as long as was asked
        text = torch.tensor([[*prompt, *one[:same]]], device=target.device)
        logits = target(text)[:, -1].float()
        seen = torch.zeros_like(logits, dtype=torch.bool).index_fill_(1, text[0], True)
        (law,) = how.log_probabilities(logits, seen)
        found.append(float(law[one[same]] - law[other[same]]))
    return found
