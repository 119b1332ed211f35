"""Write ``specmodel/data/requests.yaml``: the requests of each dataset, joined into some kinds.

    python benchmarks/request_mixes.py acceptance_replay.csv > specmodel/data/requests.yaml

The table has a row for each request and drafter: ``dataset, drafter, request, prompt_tokens,
output_tokens, rounds_at_k1 ..``, which `benchmarks` of SpecDecode-Bench's simulator profile gives.
Requests that are alike in prompt, output and both drafters' tokens per round become one kind.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pandas as pd
from scipy.cluster.vq import kmeans2

KINDS = 24
LOOKUP = {"gsm8k": (0.155, 1.07), "cnn": (0.215, 1.51), "sharegpt": (0.226, 1.78)}
LOOKUP |= {"instructcoder": (0.478, 2.41)}
"""Share of rounds in which an n-gram lookup (3 to 7 tokens) finds something, and drafts accepted
where it does, at k = 3: the lookup run again on the token ids of the same profile."""
ALIASES = {
    "gsm8k": ["gsm8k"],
    "cnn": ["cnn/dailymail", "cnn/dm", "cnndm", "cnn daily", "cnn"],
    "sharegpt": ["sharegpt"],
    "instructcoder": ["instructcoder"],
}
HEAD = """\
# Requests by dataset, joined into kinds that are alike (k-means over the logarithms of prompt, output
# and both drafters' tokens per round); written by benchmarks/request_mixes.py.
# kinds: weight, prompt tokens, output tokens, share of rounds in which an n-gram lookup finds
# something, then tokens per round at each k, of an EAGLE head and of an n-gram lookup.
schema: 1
sources:
  specdecode-bench:
    title: "SpecDecode-Bench simulator, acceptance profile of Llama-3.1-8B-Instruct on an H100; the n-gram lookup run again on its token ids"
    url: "https://github.com/SpecDecode-Bench/simulator"
    read: 2026-11-29
datasets:
"""  # noqa: E501


def kinds(table: pd.DataFrame, name: str, ks: list[int]) -> list[list[float]]:
    """Return the rows of one dataset: weight, prompt, output, hit rate, tokens per round."""
    one = table[table.dataset == name].set_index("request")
    both = {
        drafter: one[one.drafter == drafter].drop(columns=["dataset", "drafter"])
        for drafter in ("eagle", "ngram")
    }
    common = both["eagle"].index.intersection(both["ngram"].index)
    head, lookup = both["eagle"].loc[common], both["ngram"].loc[common]
    speed = [4 * np.log(x.output_tokens / x.rounds_at_k3) for x in (head, lookup)]
    features = np.column_stack([np.log(head.prompt_tokens), np.log(head.output_tokens), *speed])
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    _, label = kmeans2(features, KINDS, minit="++", seed=0)
    accepted = LOOKUP[name][1]
    found = []
    for kind in np.unique(label):
        a, b = head[label == kind], lookup[label == kind]
        tokens = [x.output_tokens.sum() / x[f"rounds_at_k{k}"].sum() for x in (a, b) for k in ks]
        hit = min((b.output_tokens.sum() / b.rounds_at_k3.sum() - 1) / accepted, 1.0)
        size = [len(a) / len(head), a.prompt_tokens.mean(), a.output_tokens.mean()]
        found.append([*size, hit, *tokens])
    return sorted(found, reverse=True)


def main() -> None:
    table: Any = pd.read_csv(sys.argv[1])
    ks = sorted(int(k) for k in re.findall(r"rounds_at_k(\d+)", " ".join(table.columns)))
    print(HEAD, end="")
    for name in LOOKUP:
        print(f"  {name}:")
        print(f"    aliases: [{', '.join(ALIASES[name])}]")
        print("    source: specdecode-bench")
        print(f"    accepted_per_hit: {LOOKUP[name][1]}")
        print(f"    k: {ks}")
        print("    kinds:")
        for row in kinds(table, name, ks):
            print("      - [" + ", ".join(f"{value:.4g}" for value in row) + "]")


if __name__ == "__main__":
    main()
