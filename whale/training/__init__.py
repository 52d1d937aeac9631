"""Whole training runs: what `whale train` does, on every rank.

Place in the flow: on top of everything. A run is a value (`run`), read from TOML; `material` makes
its vocabulary, codebook and data, `loop` trains, `record` and `progress` tell about it, `evaluate`
says how good the model is on data it has not seen, `folder` is what a run leaves behind.
"""
