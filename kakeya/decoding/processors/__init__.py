"""Processors: what changes the logits of a position before a token is selected from them.

    logits of the model  ->  + bias  ->  repetition  ->  - presence, frequency  ->  grammar's mask
                         ->  temperature, top-k, top-p, min-p, noise (`decoding.draft.sampling`)

The order is that of mlx-lm. An edit is a function of the tokens before its position alone: in a
block of drafts, position i counts the drafts before it. So the same tokens come out with and
without drafts, alone and in a batch, and after another engine has taken the sequence over. Log
probabilities are those of the logits as the model gave them.
"""
