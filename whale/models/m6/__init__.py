"""M6: one Transformer over image patches and text, its feed-forward layers mixtures of experts.

Place in the flow: a user's model, and Whale's flagship workload. Plain modules and plain values:
`config` and `model` are what is trained, `tokenizer`, `image_codes` and `pictures` turn text and
pictures into numbers, `objectives` and `mixture` make batches of them, `generate` and `score` use
what was learned, `annotate` says from outside how it is parallel.
"""
