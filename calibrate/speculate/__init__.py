"""Speculative decoding that really runs: drafters, the loop of rounds, and what they took.

In reading order: `text` what is committed, `trees` where drafts stand, `proposals` what a drafter
hands over, `drafters`, `heads` with `head_drafters`, and `lookahead` what drafts, `loop` verifies
with `specmodel.law`. `pair` and `head_training` train what no checkpoint is at hand for, `padding`
makes it cost something, `keeping` keeps it. `inputs` reads what is asked for, `summary`,
`exactness` and `predicting` say what came of it, `measuring` puts it together.
"""
