"""Greedy speculative texts against plain decoding's: how many are the same, how close the rest.

    python benchmarks/greedy.py [DEVICE]

The own pair (trained on first use) continues 200 pieces of text that it was not trained on by 48
tokens, in float32 and bfloat16. Where a text differs, the two tokens' logits at the first
difference are so far apart, in one more pass over the common text.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from calibrate.speculate.drafters import DraftModel, NGram, SelfLayers
from calibrate.speculate.exactness import gaps
from calibrate.speculate.head_training import HEADS, drafter, load_head
from calibrate.speculate.lookahead import Lookahead
from calibrate.speculate.loop import speculate
from calibrate.speculate.pair import corpus, held_out, load_pair
from calibrate.speculate.trees import Tree

PROMPTS, LENGTH, NEW, BATCH = 200, 48, 48, 50


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_num_threads(1)
    target, draft, _ = load_pair()
    heads = {kind: load_head(kind, target, np.frombuffer(corpus(), np.uint8))[0] for kind in HEADS}
    text = held_out(corpus())
    step = (len(text) - LENGTH) // PROMPTS
    prompts = [list(text[i * step : i * step + LENGTH]) for i in range(PROMPTS)]
    table = Table("drafter", "drafts", "dtype", "equal", "others", "largest gap of logits")
    for dtype in (torch.float32, torch.bfloat16):
        for module in (target, draft, *heads.values()):
            module.to(dtype=dtype, device=device)
        drafters = {
            "draft model": (DraftModel(draft), Tree.chain(4)),
            "draft model, tree": (DraftModel(draft), Tree.of([2, 2, 1])),
            **{kind: (drafter(target, head), Tree.chain(4)) for kind, head in heads.items()},
            "n-gram": (NGram(), Tree.chain(4)),
            "lookahead": (Lookahead(), Tree.chain(3)),
            "early exit": (SelfLayers(target, [0, 1]), Tree.chain(3)),
        }
        plain = texts(target, None, Tree.chain(0), prompts)
        for name, (made, tree) in drafters.items():
            apart = gaps(target, prompts, plain, texts(target, made, tree, prompts))
            largest = f"{max(map(abs, apart)):.2g}" if apart else ""
            shape = str(tree.k) if tree.is_chain else f"{len(tree.parents)} in a tree"
            same = f"{PROMPTS - len(apart)} of {PROMPTS}"
            table.add_row(name, shape, str(dtype)[6:], same, str(len(apart)), largest)
    Console(width=100).print(table)


def texts(target, made, tree, prompts):  # type: ignore[no-untyped-def]
    found = []
    for start in range(0, PROMPTS, BATCH):
        given = prompts[start : start + BATCH]
        found += speculate(target, made, given, k=tree, max_new_tokens=NEW, eos=()).tokens
    return found


if __name__ == "__main__":
    main()
