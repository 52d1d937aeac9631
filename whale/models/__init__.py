"""Plain `nn.Module`s that know nothing of parallelism: what a user brings to `wh.parallelize`.

Place in the flow: before it. Presets, examples and tests build these and annotate them from
outside.
"""
