"""All blocks: importing this fills `vocabulary.BLOCKS`."""

from tests.odd import (  # noqa: F401
    blocks_adapted,
    blocks_attention,
    blocks_chance,
    blocks_code,
    blocks_experts,
    blocks_heads,
    blocks_layers,
    blocks_members,
    blocks_plain,
    blocks_research,
    blocks_state,
    blocks_tricks,
    blocks_turns,
)
