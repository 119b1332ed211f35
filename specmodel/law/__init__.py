"""Speculative sampling that preserves the target's law, one definition for NumPy and torch.

`transforms` turns logits into the laws p and q, `rules` verifies a chain, `trees` a tree, and
`enumeration` works out, on small vocabularies, exactly what they commit.
"""

from specmodel.law.enumeration import OutputLaw, output_law_chain, output_law_tree, target_law
from specmodel.law.rules import accept_chance, draw, residual, verify_chain, without
from specmodel.law.transforms import Transform, seen_along
from specmodel.law.trees import draw_siblings, verify_tree

__all__ = [
    "Transform",
    "seen_along",
    "accept_chance",
    "residual",
    "draw",
    "verify_chain",
    "draw_siblings",
    "without",
    "verify_tree",
    "OutputLaw",
    "output_law_chain",
    "output_law_tree",
    "target_law",
]
