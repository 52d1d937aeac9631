"""Tiny models of transformers with dropout wherever their configs have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCAB = 31
IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            **IDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.2, resid_pdrop=0.2
        )
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            **IDS, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.2, attention_dropout=0.2,
        )
    ),
    "phi": lambda: hf.PhiForCausalLM(
        hf.PhiConfig(
            **IDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, resid_pdrop=0.1, embd_pdrop=0.1, attention_dropout=0.2,
        )
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            **IDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.2,
            decoder_start_token_id=0,
        )
    ),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            **IDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32,
            decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2,
            max_position_embeddings=16, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1,
            decoder_start_token_id=2, forced_eos_token_id=2,
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.2,
        )
    ),
}  # fmt: skip


def batches_of(name: str, rows: Sequence[int]) -> list[dict[str, Tensor]]:
    """A batch for each number of rows."""
    generator = torch.Generator().manual_seed(1)
    return [_batch(name, count, generator) for count in rows]


def _batch(name: str, rows: int, generator: Any) -> dict[str, Tensor]:
    if name == "vit":
        return {
            "pixel_values": torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64),
            "labels": torch.randint(3, (rows,), generator=generator),
        }
    ids = torch.randint(3, VOCAB, (rows, 6), generator=generator)
    return {"input_ids": ids, "labels": ids}
