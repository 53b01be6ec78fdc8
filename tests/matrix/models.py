"""The models of the matrix: one row each, at tiny sizes, with random weights from their own libraries.

    build("llama")        # (module in eval mode, batch), the same at every call

A row of `TABLE` is `name: (model class, kind, changes)`. The kind says the usual sizes of the config and the batch that
goes with it; changes are what this architecture spells otherwise. Sizes divide by 8 where the architecture allows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix import plain

ROWS, LENGTH, VOCAB = 8, 8, 32

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GROUPED = {"num_key_value_heads": 2}
"""Fewer heads of keys and values than of queries."""
WHOLE = {"num_key_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, **WHOLE}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}
T5 = {"d_ff": 32, "d_kv": 4, "num_layers": 1, "num_heads": 4, "num_decoder_layers": 1, "dropout_rate": 0.0}
IMAGE: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
STAGED = {"depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8, "num_stages": 2, "layer_type": "basic"}
WAVE: dict[str, Any] = {
    **TEXT,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 8,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "feat_quantizer_dropout": 0.0,
    "final_dropout": 0.0,
}
STATE: dict[str, Any] = {**TEXT, "state_size": 4, "conv_kernel": 4, "time_step_rank": 4, "use_mambapy": False}
TWO_TOWERS = {
    "text_config": {**TEXT, "projection_dim": 16, "attention_dropout": 0.0},
    "vision_config": {**IMAGE, "num_channels": 3, "projection_dim": 16, "attention_dropout": 0.0},
    "projection_dim": 16,
}

Batch = Callable[[], dict[str, Any]]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _integers(high: int, *shape: int, low: int = 3) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def _tokens() -> dict[str, Tensor]:
    ids = _integers(VOCAB, ROWS, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def _no_cache() -> dict[str, Any]:
    return {**_tokens(), "use_cache": False}


def _sentences() -> dict[str, Tensor]:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1::2, -2:] = 0
    return {"input_ids": _tokens()["input_ids"], "attention_mask": mask, "labels": _integers(2, ROWS, low=0)}


def _images(channels: int = 4, size: int = 8) -> dict[str, Tensor]:
    return {"pixel_values": _random(ROWS, channels, size, size), "labels": _integers(8, ROWS, low=0)}


def _masks(size: int) -> dict[str, Tensor]:
    return {"pixel_values": _random(ROWS, 4, 32, 32), "labels": _integers(8, ROWS, size, size, low=0)}


def _waves() -> dict[str, Tensor]:
    return {"input_values": _random(ROWS, 128), "labels": _integers(8, ROWS, low=0)}


def _pairs(**others: Any) -> dict[str, Any]:
    tokens = _integers(VOCAB, ROWS, LENGTH)
    tokens[:, -1] = 2
    return {"input_ids": tokens, "pixel_values": _random(ROWS, 3, 8, 8), **others}


def _speech() -> dict[str, Any]:
    return {"input_features": _random(ROWS, 8, 16), "labels": _tokens()["labels"], "use_cache": False}


KINDS: dict[str, tuple[dict[str, Any], Batch]] = {
    "causal": (TEXT, _no_cache),
    "masked": (TEXT, _tokens),
    "sentence": (TEXT, _sentences),
    "seq2seq": (SEQ2SEQ, _no_cache),
    "image": (IMAGE, _images),
    "pyramid": ({"num_channels": 4, "num_labels": 8, "image_size": 32}, functools.partial(_images, size=32)),
    "segments": ({"num_channels": 4, "num_labels": 8}, functools.partial(_masks, 32)),
    "wave": (WAVE, _waves),
    "speech": ({**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}, _speech),
    "state": (STATE, _no_cache),
    "pair": (TWO_TOWERS, functools.partial(_pairs, return_loss=True)),
}

Row = tuple[str, str, dict[str, Any]]

TABLE: dict[str, Row] = {
    # decoders
    "llama": ("LlamaForCausalLM", "causal", GROUPED),
    "gpt2": ("GPT2LMHeadModel", "causal", {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "gpt_neo": ("GPTNeoForCausalLM", "causal", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", "causal", {}),
    "gptj": ("GPTJForCausalLM", "causal", {"rotary_dim": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "causal", {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "opt": ("OPTForCausalLM", "causal", {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "bloom": ("BloomForCausalLM", "causal", {}),
    "falcon": ("FalconForCausalLM", "causal", {}),
    "mpt": ("MptForCausalLM", "causal", {"max_seq_len": 16, "expansion_ratio": 2}),
    "phi": ("PhiForCausalLM", "causal", {"resid_pdrop": 0.0}),
    "phi3": ("Phi3ForCausalLM", "causal", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "causal", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "causal", {**GROUPED, "head_dim": 4}),
    "gemma": ("GemmaForCausalLM", "causal", {**GROUPED, "head_dim": 4}),
    "gemma2": ("Gemma2ForCausalLM", "causal", {**GROUPED, "head_dim": 4, "sliding_window": 4}),
    "gemma3": ("Gemma3ForCausalLM", "causal", {**GROUPED, "head_dim": 4, "sliding_window": 4}),
    "mistral": ("MistralForCausalLM", "causal", {**GROUPED, "sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", "causal", {**GROUPED, **EXPERTS}),
    "mixtral, router's loss": ("MixtralForCausalLM", "causal", {**GROUPED, **EXPERTS, "output_router_logits": True}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "causal", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "causal", {**GROUPED, **EXPERTS, "head_dim": 4}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "causal",
        {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
        | {"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "causal",
        {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
        | {"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "olmo": ("OlmoForCausalLM", "causal", WHOLE),
    "olmo2": ("Olmo2ForCausalLM", "causal", WHOLE),
    "olmoe": ("OlmoeForCausalLM", "causal", {**WHOLE, **EXPERTS}),
    "cohere": ("CohereForCausalLM", "causal", GROUPED),
    "cohere2": ("Cohere2ForCausalLM", "causal", {**GROUPED, "sliding_window": 4}),
    "stablelm": ("StableLmForCausalLM", "causal", WHOLE),
    "starcoder2": ("Starcoder2ForCausalLM", "causal", {**GROUPED, "residual_dropout": 0, "embedding_dropout": 0}),
    "granite": ("GraniteForCausalLM", "causal", GROUPED),
    "granitemoe": ("GraniteMoeForCausalLM", "causal", {**GROUPED, **EXPERTS}),
    "smollm3": ("SmolLM3ForCausalLM", "causal", GROUPED),
    "glm": ("GlmForCausalLM", "causal", {**GROUPED, "head_dim": 4}),
    "glm4": ("Glm4ForCausalLM", "causal", {**GROUPED, "head_dim": 4}),
    "persimmon": ("PersimmonForCausalLM", "causal", {}),
    "nemotron": ("NemotronForCausalLM", "causal", {**GROUPED, "head_dim": 4}),
    "helium": ("HeliumForCausalLM", "causal", {**GROUPED, "head_dim": 4}),
    "gpt_oss": ("GptOssForCausalLM", "causal", {**GROUPED, **EXPERTS, "head_dim": 4, "sliding_window": 4}),
    "xglm": ("XGLMForCausalLM", "causal", {**SEQ2SEQ, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32}),
    "biogpt": ("BioGptForCausalLM", "causal", {}),
    # encoders
    "bert": ("BertForMaskedLM", "masked", {}),
    "bert, padded": ("BertForSequenceClassification", "sentence", {}),
    "roberta": ("RobertaForMaskedLM", "masked", {}),
    "distilbert": (
        "DistilBertForMaskedLM",
        "masked",
        {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 4, "dropout": 0, "attention_dropout": 0},
    ),
    "albert": ("AlbertForMaskedLM", "masked", {"embedding_size": 8}),
    "electra": ("ElectraForMaskedLM", "masked", {"embedding_size": 8}),
    "deberta_v2": (
        "DebertaV2ForMaskedLM",
        "masked",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8},
    ),
    "mpnet": ("MPNetForMaskedLM", "masked", {}),
    "modernbert": ("ModernBertForMaskedLM", "masked", {"global_attn_every_n_layers": 2, "local_attention": 4}),
    "camembert": ("CamembertForMaskedLM", "masked", {}),
    "xlm_roberta": ("XLMRobertaForSequenceClassification", "sentence", {}),
    "fnet": ("FNetForMaskedLM", "masked", {}),
    "squeezebert": ("SqueezeBertForMaskedLM", "masked", {"embedding_size": 16}),
    "convbert": ("ConvBertForMaskedLM", "masked", {"embedding_size": 16, "conv_kernel_size": 3, "head_ratio": 2}),
    # encoder-decoders
    "t5": ("T5ForConditionalGeneration", "seq2seq", T5),
    "mt5": ("MT5ForConditionalGeneration", "seq2seq", T5),
    "umt5": ("UMT5ForConditionalGeneration", "seq2seq", T5),
    "bart": ("BartForConditionalGeneration", "seq2seq", {}),
    "mbart": ("MBartForConditionalGeneration", "seq2seq", {}),
    "pegasus": ("PegasusForConditionalGeneration", "seq2seq", {}),
    "marian": ("MarianMTModel", "seq2seq", {"decoder_vocab_size": VOCAB}),
    "m2m_100": ("M2M100ForConditionalGeneration", "seq2seq", {}),
    "blenderbot": ("BlenderbotForConditionalGeneration", "seq2seq", {}),
    # vision
    "vit": ("ViTForImageClassification", "image", {}),
    "deit": ("DeiTForImageClassification", "image", {}),
    "beit": ("BeitForImageClassification", "image", {"drop_path_rate": 0.0}),
    "dinov2": ("Dinov2ForImageClassification", "image", {"mlp_ratio": 2, "drop_path_rate": 0.0}),
    "swin": (
        "SwinForImageClassification",
        "pyramid",
        {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0},
    ),
    "convnext": ("ConvNextForImageClassification", "pyramid", STAGED),
    "convnextv2": ("ConvNextV2ForImageClassification", "pyramid", STAGED),
    "resnet": ("ResNetForImageClassification", "pyramid", STAGED),
    "regnet": ("RegNetForImageClassification", "pyramid", {**STAGED, "layer_type": "x", "groups_width": 4}),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", "pyramid", {"depth_multiplier": 0.25}),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", "pyramid", {"depth_multiplier": 0.25}),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "segments",
        {
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_encoder_blocks": 2,
            "sr_ratios": [2, 1],
            "decoder_hidden_size": 16,
        }
        | {"num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "strides": [4, 2], "patch_sizes": [7, 3]}
        | {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0},
    ),
    "poolformer": (
        "PoolFormerForImageClassification",
        "pyramid",
        {"depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "mlp_ratio": 2.0}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "drop_path_rate": 0.0},
    ),
    # audio
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "wave", {}),
    "hubert": ("HubertForSequenceClassification", "wave", {}),
    "wavlm": ("WavLMForSequenceClassification", "wave", {}),
    "whisper": ("WhisperForConditionalGeneration", "speech", {}),
    # multimodal
    "clip": ("CLIPModel", "pair", {}),
    "siglip": ("SiglipModel", "pair", {}),
    "llava": ("LlavaForConditionalGeneration", "llava", {}),
    "blip": ("BlipForConditionalGeneration", "blip", {}),
    # state space
    "mamba": ("MambaForCausalLM", "state", {}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "state",
        {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    "rwkv": ("RwkvForCausalLM", "causal", {"attention_hidden_size": 16, "context_length": 16}),
    # plain torch.nn
    **{name: ("", name, {}) for name in plain.MODELS},
}


def _llava() -> dict[str, Any]:
    batch = _no_cache()
    ids = batch["input_ids"].clamp(max=VOCAB - 2)
    ids[:, :4] = VOCAB - 1
    return {**batch, "input_ids": ids, "pixel_values": _random(ROWS, 3, 8, 8)}


def _blip() -> dict[str, Any]:
    return _pairs(labels=_tokens()["labels"])


KINDS |= {
    "llava": (
        {
            "text_config": {**TEXT, **GROUPED, "model_type": "llama"},
            "vision_config": {**IMAGE, "num_channels": 3, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_index": VOCAB - 1,
            "image_token_id": VOCAB - 1,
        },
        _llava,
    ),
    "blip": ({**TWO_TOWERS, "text_config": {**TWO_TOWERS["text_config"], "encoder_hidden_size": 16}}, _blip),
}


def import_all(names: Iterable[str]) -> None:
    """Imports the libraries of the models, so that processes that are forked from here needn't."""
    import transformers

    for name in names:
        if class_name := TABLE[name][0]:
            getattr(transformers, class_name)


def build(name: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model `name` of `TABLE`, without dropout, and its batch of `ROWS` samples."""
    class_name, kind, changes = TABLE[name]
    torch.manual_seed(0)
    if not class_name:
        return plain.MODELS[name]()
    import transformers

    sizes, batch = KINDS[kind]
    model_class = getattr(transformers, class_name)
    model: nn.Module = model_class(model_class.config_class(**{**sizes, **changes}))
    return model.eval(), batch()
