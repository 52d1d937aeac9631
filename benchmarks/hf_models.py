"""The shelf: Hugging Face architectures from tiny configs, with a batch each; nothing is loaded.

Place in the flow: `benchmarks.hf_shelf` trains each under several layouts, and the quick part of
the tests does so with some. A model is made by name, so that a rank needs no more than the name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.hf_batches import VOCAB, Batch, causal, images, masked, spoken, translated, waves
from benchmarks.hf_wide import widen

HIDDEN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelved:
    """One architecture.

    Attributes:
        name: what it is found by.
        family: dense, experts, encoder, encoder-decoder, vision, audio, state space or lora.
        config: class of its config.
        model: class of the model, which returns a loss of its `labels`.
        sizes: arguments of the config, in the config's own names.
        batch: makes a global batch of a seed and a number of rows.
    """

    name: str
    family: str
    config: str
    model: str
    sizes: dict[str, Any]
    batch: Callable[[int, int], Batch]
    lora: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """The model in float64 with always the same weights, all dropout 0, in training mode."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return self._make().to(torch.float64).train()
        finally:
            torch.set_default_dtype(before)

    def _make(self) -> nn.Module:
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, self.config)(**self.sizes)
        for name in vars(config):
            if any(word in name for word in _RANDOM) and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
        config.use_cache = False
        kind = getattr(transformers, self.model)
        widen()
        if self.name not in _RUN:
            # Some modules are imported by the first forward; it may leave states behind.
            _RUN.add(self.name)
            with torch.no_grad():
                kind(config).to(torch.float64).eval()(**self.batch(0, 2))
            widen()
            torch.manual_seed(0)
        model: nn.Module = kind(config)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        _fill(model)
        if self.lora:
            peft = importlib.import_module("peft")
            adapter = peft.LoraConfig(
                r=4, target_modules=list(self.lora), lora_dropout=0.0, init_lora_weights=False
            )
            return _Unwrapped(peft.get_peft_model(model, adapter))
        return model


class _Unwrapped(nn.Module):
    """A peft model called by keyword, as Whale and the reference call every model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


_RUN: set[str] = set()
_RANDOM = ("dropout", "drop_rate", "dropout_rate", "layerdrop", "pdrop", "drop_path", "jitter")


def _fill(model: nn.Module) -> None:
    """Parameters that transformers leaves at 0 or 1 would hide errors in what they multiply."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise)


_LM: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_KV = {"num_key_value_heads": 2}
_EXPERTS = {"experts_implementation": "eager", "num_experts_per_tok": 2, **_KV}
_D_MODEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "init_std": 0.2,
}
_VISION: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
    "initializer_range": 0.2,
}
_N_EMBD: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "n_ctx": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_CONVS = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}


def _lm(
    name: str, prefix: str, family: str = "dense", head: str = "ForCausalLM", **more: Any
) -> Shelved:
    sizes = {k: v for k, v in {**_LM, **more}.items() if v is not None}
    return Shelved(
        name=name, family=family, config=f"{prefix}Config", model=f"{prefix}{head}",
        sizes=sizes, batch=causal,
    )  # fmt: skip


def _moe(name: str, prefix: str, **more: Any) -> Shelved:
    return _lm(name, prefix, "experts", **{**_EXPERTS, **more})


def _old(name: str, prefix: str, head: str = "ForCausalLM", **more: Any) -> Shelved:
    sizes = {k: v for k, v in {**_N_EMBD, **more}.items() if v is not None}
    return Shelved(
        name=name, family="dense", config=f"{prefix}Config", model=f"{prefix}{head}",
        sizes=sizes, batch=causal,
    )  # fmt: skip


def _encoder(name: str, prefix: str, **more: Any) -> Shelved:
    sizes = {k: v for k, v in {**_LM, **more}.items() if v is not None}
    return Shelved(
        name=name, family="encoder", config=f"{prefix}Config", model=f"{prefix}ForMaskedLM",
        sizes=sizes, batch=masked,
    )  # fmt: skip


def _seq2seq(
    name: str, prefix: str, sizes: dict[str, Any], head: str = "ForConditionalGeneration",
    family: str = "encoder-decoder", **more: Any,
) -> Shelved:  # fmt: skip
    sizes = {k: v for k, v in {**sizes, **more}.items() if v is not None}
    return Shelved(
        name=name, family=family, config=f"{prefix}Config", model=f"{prefix}{head}",
        sizes=sizes, batch=translated,
    )  # fmt: skip


def _vision(name: str, prefix: str, **more: Any) -> Shelved:
    sizes = {k: v for k, v in {**_VISION, **more}.items() if v is not None}
    size = int(sizes.get("image_size", 32))
    return Shelved(
        name=name, family="vision", config=f"{prefix}Config",
        model=f"{prefix}ForImageClassification", sizes=sizes, batch=partial(images, size=size),
    )  # fmt: skip


_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA4_LAYERS = {"no_rope_layers": [1, 0], "interleave_moe_layer_step": 2}

_ALL: tuple[Shelved, ...] = (
    # Dense decoders.
    _old("gpt2", "GPT2", "LMHeadModel"),
    _old(
        "gpt_neo", "GPTNeo", n_embd=None, n_layer=None, n_head=None, n_positions=None, n_ctx=None,
        hidden_size=HIDDEN, num_layers=2, num_heads=4, max_position_embeddings=16,
        attention_types=[[["global", "local"], 1]], window_size=4, intermediate_size=48,
    ),
    _lm("gpt_neox", "GPTNeoX"),
    _lm("gpt_neox_serial", "GPTNeoX", use_parallel_residual=False),
    _old("gptj", "GPTJ", rotary_dim=4),
    _old("codegen", "CodeGen", rotary_dim=4, n_head=4),
    _old("gpt_bigcode", "GPTBigCode"),
    _lm("opt", "OPT", ffn_dim=48, intermediate_size=None, word_embed_proj_dim=HIDDEN),
    _lm(
        "bloom", "Bloom", intermediate_size=None, max_position_embeddings=None, n_layer=2,
        n_head=4, num_hidden_layers=None, num_attention_heads=None,
    ),
    Shelved(
        name="mpt", family="dense", config="MptConfig", model="MptForCausalLM", batch=causal,
        sizes={"vocab_size": VOCAB, "d_model": HIDDEN, "n_heads": 4, "n_layers": 2,
               "expansion_ratio": 2, "max_seq_len": 16, "initializer_range": 0.2},
    ),
    _lm(
        "falcon", "Falcon", new_decoder_architecture=True, num_kv_heads=2, intermediate_size=None,
        max_position_embeddings=None,
    ),
    _lm(
        "falcon_7b", "Falcon", new_decoder_architecture=False, multi_query=True,
        intermediate_size=None, max_position_embeddings=None,
    ),
    _lm(
        "falcon_rw", "Falcon", new_decoder_architecture=False, multi_query=False, alibi=True,
        bias=True, parallel_attn=False, intermediate_size=None, max_position_embeddings=None,
    ),
    _lm("llama", "Llama", **_KV),
    _lm("mistral", "Mistral", sliding_window=4, **_KV),
    _lm("qwen2", "Qwen2", **_KV),
    _lm("qwen3", "Qwen3", head_dim=8, **_KV),
    _lm("gemma", "Gemma", head_dim=8, **_KV),
    _lm("gemma2", "Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8, **_KV),
    Shelved(
        name="gemma3", family="dense", config="Gemma3TextConfig", model="Gemma3ForCausalLM",
        sizes={**_LM, **_KV, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
        batch=causal,
    ),
    _lm("phi", "Phi"),
    _lm("phi3", "Phi3", **_KV),
    _lm("olmo", "Olmo", **_KV),
    _lm("olmo2", "Olmo2", **_KV),
    _lm("stablelm", "StableLm", **_KV),
    _lm("starcoder2", "Starcoder2", **_KV),
    _lm("cohere", "Cohere", **_KV),
    _lm("cohere2", "Cohere2", sliding_window=4, **_KV),
    _lm("glm", "Glm", head_dim=8, **_KV),
    _lm("glm4", "Glm4", head_dim=8, **_KV),
    _lm("granite", "Granite", **_KV),
    _lm("persimmon", "Persimmon"),
    _lm("smollm3", "SmolLM3", **_KV),
    _lm("nemotron", "Nemotron", **_KV),
    _lm("helium", "Helium", head_dim=8, **_KV),
    _lm("exaone4", "Exaone4", sliding_window=4, **_KV),
    _lm("xglm", "XGLM", d_model=HIDDEN, num_layers=2, attention_heads=4, ffn_dim=48,
        hidden_size=None, num_hidden_layers=None, num_attention_heads=None,
        intermediate_size=None, init_std=0.2),
    _lm("biogpt", "BioGpt"),
    Shelved(
        name="ctrl", family="dense", config="CTRLConfig", model="CTRLLMHeadModel", batch=causal,
        sizes={"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "dff": 48,
               "n_positions": 16, "initializer_range": 0.2},
    ),
    # Mixtures of experts.
    _moe("mixtral", "Mixtral", num_local_experts=6),
    _moe("qwen2_moe", "Qwen2Moe", num_experts=6, moe_intermediate_size=16,
         shared_expert_intermediate_size=16),
    _moe("qwen3_moe", "Qwen3Moe", num_experts=6, moe_intermediate_size=16, head_dim=8),
    _moe("deepseek_v2", "DeepseekV2", n_routed_experts=6, n_shared_experts=1, kv_lora_rank=8,
         q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
         moe_intermediate_size=16, first_k_dense_replace=1, num_key_value_heads=4, n_group=1,
         topk_group=1),
    _moe("deepseek_v3", "DeepseekV3", n_routed_experts=6, n_shared_experts=1, kv_lora_rank=8,
         q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
         moe_intermediate_size=16, first_k_dense_replace=1, num_key_value_heads=4, n_group=2,
         topk_group=1),
    _moe("olmoe", "Olmoe", num_experts=6),
    _moe("phimoe", "Phimoe", num_local_experts=6),
    _moe("granitemoe", "GraniteMoe", num_local_experts=6),
    _moe("jetmoe", "JetMoe", num_local_experts=6, kv_channels=8, num_key_value_heads=4,
         num_attention_heads=None),
    Shelved(
        name="dbrx", family="experts", config="DbrxConfig", model="DbrxForCausalLM", batch=causal,
        sizes={"vocab_size": VOCAB, "d_model": HIDDEN, "n_heads": 4, "n_layers": 2,
               "max_seq_len": 16,
               "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
               "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 2},
               "initializer_range": 0.2},
    ),
    _moe("gpt_oss", "GptOss", num_local_experts=6, head_dim=8, sliding_window=4),
    Shelved(
        name="llama4", family="experts", config="Llama4TextConfig", model="Llama4ForCausalLM",
        sizes={**_LM, **_EXPERTS, **_LLAMA4_LAYERS, "num_experts_per_tok": 1,
               "num_local_experts": 6, "intermediate_size_mlp": 48, "head_dim": 8},
        batch=causal,
    ),
    _seq2seq(
        "switch_transformers", "SwitchTransformers", _T5, family="experts", num_experts=4,
        expert_capacity=64, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        router_jitter_noise=0.0, add_router_probs=False,
    ),
    _seq2seq(
        "nllb_moe", "NllbMoe", _D_MODEL, family="experts", num_experts=4, expert_capacity=64,
        encoder_sparse_step=2, decoder_sparse_step=2, router_jitter_noise=0.0,
        moe_eval_capacity_token_fraction=-1.0, second_expert_policy="all",
    ),
    _moe("ernie4_5_moe", "Ernie4_5_Moe", moe_num_experts=6, moe_k=2, moe_intermediate_size=16,
         moe_num_shared_experts=1, moe_layer_start_index=1, num_experts_per_tok=None),
    _moe("glm4_moe", "Glm4Moe", n_routed_experts=6, moe_intermediate_size=16, n_group=1,
         topk_group=1, first_k_dense_replace=1, head_dim=8),
    _moe("jamba", "Jamba", num_experts=4, expert_layer_period=2, expert_layer_offset=1,
         attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4,
         use_mamba_kernels=False),
    # Encoders.
    _encoder("bert", "Bert"),
    _encoder("roberta", "Roberta"),
    _encoder("xlm_roberta", "XLMRoberta"),
    _encoder("camembert", "Camembert"),
    _encoder("albert", "Albert", embedding_size=16),
    _encoder("electra", "Electra", embedding_size=16),
    _encoder("distilbert", "DistilBert", dim=HIDDEN, n_layers=2, n_heads=4, hidden_dim=48,
             hidden_size=None, num_hidden_layers=None, num_attention_heads=None,
             intermediate_size=None),
    _encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"],
             type_vocab_size=0),
    _encoder("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"],
             type_vocab_size=0),
    _encoder("mpnet", "MPNet"),
    _encoder("modernbert", "ModernBert", cls_token_id=1, sep_token_id=2, local_attention=4,
             global_attn_every_n_layers=2),
    _encoder("layoutlm", "LayoutLM"),
    _encoder("esm", "Esm", mask_token_id=3, position_embedding_type="rotary",
             token_dropout=False),
    Shelved(
        name="xlnet", family="encoder", config="XLNetConfig", model="XLNetLMHeadModel",
        sizes={"vocab_size": VOCAB, "d_model": HIDDEN, "n_layer": 2, "n_head": 4, "d_inner": 48,
               "initializer_range": 0.2},
        batch=masked,
    ),
    # Encoder-decoders.
    _seq2seq("t5", "T5", _T5),
    _seq2seq("mt5", "MT5", _T5, feed_forward_proj="gated-gelu"),
    _seq2seq("umt5", "UMT5", _T5),
    _seq2seq("longt5", "LongT5", _T5, local_radius=3),
    _seq2seq("bart", "Bart", _D_MODEL),
    _seq2seq("mbart", "MBart", _D_MODEL),
    _seq2seq("pegasus", "Pegasus", _D_MODEL),
    _seq2seq("marian", "Marian", _D_MODEL, head="MTModel", decoder_vocab_size=VOCAB),
    _seq2seq("blenderbot", "Blenderbot", _D_MODEL),
    _seq2seq("m2m_100", "M2M100", _D_MODEL),
    _seq2seq("led", "LED", _D_MODEL, attention_window=4, max_encoder_position_embeddings=16,
             max_decoder_position_embeddings=16, max_position_embeddings=None),
    # Vision.
    _vision("vit", "ViT"),
    _vision("deit", "DeiT"),
    _vision("beit", "Beit"),
    _vision("dinov2", "Dinov2", intermediate_size=None, mlp_ratio=2),
    _vision("swin", "Swin", hidden_size=None, num_attention_heads=None, num_hidden_layers=None,
            intermediate_size=None, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=2),
    _vision("convnext", "ConvNext", hidden_size=None, num_attention_heads=None,
            num_hidden_layers=None, intermediate_size=None, hidden_sizes=[8, 16], depths=[1, 1],
            num_stages=2, patch_size=2),
    _vision("resnet", "ResNet", hidden_size=None, num_attention_heads=None, patch_size=None,
            num_hidden_layers=None, intermediate_size=None, embedding_size=8, image_size=32,
            hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    Shelved(
        name="clip", family="vision", config="CLIPConfig", model="CLIPForImageClassification",
        sizes={"vision_config": dict(_VISION), "text_config": dict(_LM), "num_labels": 3},
        batch=images,
    ),
    Shelved(
        name="siglip", family="vision", config="SiglipConfig",
        model="SiglipForImageClassification",
        sizes={"vision_config": dict(_VISION), "text_config": dict(_LM), "num_labels": 3},
        batch=images,
    ),
    # Audio.
    _seq2seq(
        "whisper", "Whisper", {**_D_MODEL, "max_position_embeddings": None}, family="audio",
        num_mel_bins=8, max_source_positions=6, max_target_positions=16,
    ),
    *(
        Shelved(
            name=name, family="audio", config=f"{prefix}Config",
            model=f"{prefix}ForSequenceClassification", batch=waves,
            sizes={**{k: v for k, v in _LM.items() if k != "max_position_embeddings"}, **_CONVS,
                   "num_labels": 3, "num_feat_extract_layers": 2, "apply_spec_augment": False,
                   "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
                   "feat_extract_norm": norm, "classifier_proj_size": 16},
        )
        for name, prefix, norm in (
            ("wav2vec2", "Wav2Vec2", "layer"), ("hubert", "Hubert", "group"),
            ("wavlm", "WavLM", "layer"),
        )
    ),
    Shelved(
        name="speech_to_text", family="audio", config="Speech2TextConfig",
        model="Speech2TextForConditionalGeneration", batch=partial(spoken, shape=(16, 8)),
        sizes={**{k: v for k, v in _D_MODEL.items() if k != "max_position_embeddings"},
               "input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16,
               "max_source_positions": 16, "max_target_positions": 16},
    ),
    # State space and recurrences.
    _lm("mamba", "Mamba", "state space", state_size=4, num_attention_heads=None,
        intermediate_size=None, max_position_embeddings=None, time_step_rank=4,
        use_mambapy=False),
    _lm("mamba2", "Mamba2", "state space", state_size=4, num_heads=8, head_dim=8, n_groups=2,
        num_attention_heads=None, intermediate_size=None, max_position_embeddings=None,
        chunk_size=4),
    _lm("falcon_mamba", "FalconMamba", "state space", state_size=4, num_attention_heads=None,
        intermediate_size=None, max_position_embeddings=None, time_step_rank=4),
    _lm("rwkv", "Rwkv", "state space", context_length=16, attention_hidden_size=HIDDEN,
        num_attention_heads=None, max_position_embeddings=None),
    _lm("recurrent_gemma", "RecurrentGemma", "state space", lru_width=HIDDEN, num_hidden_layers=3,
        attention_window_size=4, max_position_embeddings=None, head_dim=8),
)  # fmt: skip


def _shelf() -> dict[str, Shelved]:
    found = {shelved.name: shelved for shelved in _ALL}
    speech = found["whisper"]
    found["whisper"] = Shelved(
        **{name: getattr(speech, name) for name in ("name", "family", "config", "model", "sizes")},
        batch=spoken,
    )
    for name, targets in (
        ("gpt2", ("c_attn",)),
        ("llama", ("q_proj", "v_proj", "down_proj")),
        ("mistral", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ):
        base = found[name]
        found[f"{name}+lora"] = Shelved(
            name=f"{name}+lora", family="lora", config=base.config, model=base.model,
            sizes=base.sizes, batch=base.batch, lora=targets,
        )  # fmt: skip
    return found


SHELF: dict[str, Shelved] = _shelf()
"""By name, in the order of the table."""
