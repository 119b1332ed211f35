"""Lookahead decoding: n-grams from Jacobi iterations that ride in the target's own passes."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.engine.cache import Cache
from calibrate.speculate.proposals import Extra, Layout, Proposal, Uniform, only_chains
from calibrate.speculate.text import Text
from calibrate.speculate.trees import Tree
from specmodel.errors import DomainError
from specmodel.law import Transform


class Lookahead:
    """No draft pass: rows beside the drafts guess what stands further on, round after round [1]_.

    For k drafts a window of `window` columns holds the last k guesses at each place, newest
    last. The target's likeliest token after the newest closes an n-gram of k + 1 tokens, kept by
    its first one; a round verifies up to `guesses` of those that begin with the last token, as a
    tree. Every pass has 1 + (window + guesses) k rows. What is proposed follows from the text
    without chance, so that it is exact at any temperature.

    Parameters
    ----------
    window, guesses : int
    seed : int
        Of the first guesses, drawn from the prompt's tokens.

    References
    ----------
    .. [1] Fu et al., Lookahead Decoding, ICML 2024, arXiv:2402.02057.
    """

    reads_features = False

    def __init__(self, *, window: int = 7, guesses: int = 7, seed: int = 0) -> None:
        if window < 1 or guesses < 1:
            raise DomainError(f"window and guesses must be >= 1; got {window} and {guesses}")
        self.window, self.guesses, self.seed = window, guesses, seed

    def start(self, text: Text, cache: Cache) -> None:
        """Begin with a batch, nothing guessed."""
        self.text = text
        self._levels: Tensor | None = None  # (batch, k, window), the oldest guesses first
        self._known: list[dict[int, list[tuple[int, ...]]]] = [{} for _ in text.lengths]

    def rows(self, tree: Tree) -> int:
        """Return those of guesses and window."""
        return (self.window + self.guesses) * only_chains(tree, "lookahead")

    def end(self) -> None:
        """Do nothing: it holds texts and guesses."""

    def propose(self, tree: Tree, transform: Transform, uniform: Uniform) -> Proposal:
        """Return the n-grams that begin with the last token, and the window."""
        k = tree.k
        if self._levels is None:
            self._levels = self._first(k)
        last = self.text.last(torch.ones_like(self.text.lengths), 1)[:, 0].tolist()
        listed = [
            [*found.get(token, []), *[(-1,) * k] * self.guesses][: self.guesses]
            for found, token in zip(self._known, last, strict=True)
        ]
        guesses = torch.tensor(listed, device=self._levels.device)  # (batch, guesses, k)
        tokens, layout = self._layout(guesses)
        return Proposal(tokens, layout=layout, extra=Extra(self._levels.flatten(1), self._observe))

    def settle(self, nodes: Tensor, counts: Tensor) -> None:
        """Do nothing: guesses stay guesses."""

    def _first(self, k: int) -> Tensor:
        """Return guesses to begin with: tokens of the text at random."""
        lengths, device = self.text.lengths, self.text.tokens.device
        generator = torch.Generator(device).manual_seed(self.seed)
        size = k * self.window
        u = torch.rand(len(lengths), size, generator=generator, device=device)
        tokens = self.text.tokens.gather(1, (u * lengths[:, None]).long())
        return tokens.view(-1, k, self.window)

    def _observe(self, logits: Tensor) -> None:
        """Take the target's logits (batch, k * window, vocab) at the window's rows."""
        if self._levels is None:
            raise DomainError("nothing was proposed")
        size, k, window = self._levels.shape
        new = logits.view(size, k, window, -1)[:, -1].argmax(-1)
        grams = torch.cat((self._levels, new[:, None]), 1).transpose(1, 2)
        for known, rows in zip(self._known, grams.tolist(), strict=True):
            for first, *rest in rows:
                before = [one for one in known.get(first, []) if one != tuple(rest)]
                known[first] = [tuple(rest), *before][: self.guesses]
        self._levels = torch.cat((self._levels[:, 1:], new[:, None]), 1)

    def _layout(self, guesses: Tensor) -> tuple[Tensor, Layout]:
        """Return nodes of the tree that n-grams form (a shared start once), and how rows stand."""
        size, n, k = guesses.shape
        device, nodes, window = guesses.device, n * k, k * self.window
        same = (guesses[:, :, None] == guesses[:, None]).long().cumprod(-1)  # up to each depth
        first = same.argmax(2)  # the n-gram that a start is first found in: (batch, n, k)
        own = first == torch.arange(n, device=device)[:, None]
        depth = torch.arange(k, device=device)
        node = first * k + depth
        parents = torch.cat((torch.full_like(node[..., :1], -1), node[..., :-1]), -1)
        tokens = torch.where(own, guesses, -1)
        sees = torch.zeros(size, n, k, 1 + nodes + window, dtype=torch.bool, device=device)
        sees[..., 0] = True
        for d in range(k):  # everything from depth d on sees the node of its start there
            index = (1 + node[:, :, d])[:, :, None, None].expand(-1, -1, k - d, 1)
            sees[:, :, d:].scatter_(3, index, True)
        whole = torch.eye(1 + nodes + window, dtype=torch.bool, device=device).repeat(size, 1, 1)
        whole[:, 1 : 1 + nodes] |= sees.flatten(1, 2)
        whole[:, 1 + nodes :, 0] = True
        whole[:, 1 + nodes :, 1 + nodes :] = self._window_sees(k, device)
        columns = torch.arange(self.window, device=device)
        ahead = (1 + depth[:, None] + columns).flatten()  # level j, column i: 1 + i + j
        places = torch.cat((torch.zeros(1, device=device).long(), (1 + depth).repeat(n), ahead))
        return tokens.flatten(1), Layout(parents.flatten(1), places, whole)

    def _window_sees(self, k: int, device: torch.device) -> Tensor:
        """Return which of the window's rows each sees: oldest guesses so far, then its column."""
        level = torch.arange(k, device=device).repeat_interleave(self.window)
        column = torch.arange(self.window, device=device).repeat(k)
        oldest = (level == 0) & (column <= column[:, None])
        return oldest | ((column == column[:, None]) & (level <= level[:, None]))
