"""All blocks: importing this fills `vocabulary.BLOCKS`."""

from tests.odd import (  # noqa: F401
    blocks_attention,
    blocks_chance,
    blocks_code,
    blocks_experts,
    blocks_members,
    blocks_plain,
    blocks_state,
    blocks_turns,
)
