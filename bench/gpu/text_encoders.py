"""Published configurations of text encoders, without the keys that equal the defaults of transformers.

Each states where its values come from: either a file of the model, or public code that quotes the file or
reads the published weights with these sizes.
"""

from __future__ import annotations

from bench.gpu.published import FLUX, SDXL, Config

CLIP_L: Config = SDXL["text_encoder"]
CLIP_G: Config = SDXL["text_encoder_2"]
T5_XXL: Config = FLUX["text_encoder_2"]

# stabilityai/stable-diffusion-2-1, text_encoder/config.json: OpenCLIP's ViT-H without its last layer.
CLIP_H: Config = {
    **CLIP_L,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "projection_dim": 512,
}

# EleutherAI/pile-t5-xl, by the preset PileT5Xl of HartsyInference, which loads AuraFlow's weights.
PILE_T5_XL: Config = {
    "vocab_size": 32128,
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_layers": 24,
    "num_heads": 32,
}

# google/umt5-xxl, config.json, as musubi-tuner's `umt5_xxl` and the encoder of Wan 2.1 quote it.
UMT5_XXL: Config = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}

# Qwen/Qwen3-4B, as quoted from Z-Image's text_encoder/config.json by several loaders of Z-Image.
QWEN3_4B: Config = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}

# Qwen/Qwen3-0.6B, as configs/qwen3_06b/config.json of kohya-ss/sd-scripts quotes it for Anima.
QWEN3_06B: Config = {
    **QWEN3_4B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}

# Qwen/Qwen3-VL-4B-Instruct, config.json as written by transformers 4.57.
QWEN3_VL_4B: Config = {
    "text_config": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
}

# Qwen/Qwen3-VL-8B-Instruct, config.json. Ideogram 4 and Qwen-Image 2.1 use it.
QWEN3_VL_8B: Config = {
    "text_config": {
        **QWEN3_VL_4B["text_config"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
    },
    "vision_config": {"out_hidden_size": 4096},
    "tie_word_embeddings": False,
}

# Qwen/Qwen2.5-VL-7B-Instruct, config.json as Qwen-Image's text_encoder has it (transformers 4.53).
QWEN2_5_VL_7B: Config = {
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
}

# black-forest-labs/FLUX.2-dev, text_encoder/config.json; transformers' defaults have these sizes too.
MISTRAL_SMALL_24B: Config = {
    "text_config": {
        "model_type": "mistral",
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "vision_config": {"model_type": "pixtral"},
}

# baidu/ERNIE-Image, text_encoder/config.json: Ministral 3 3B, as ports of ERNIE-Image quote it.
MINISTRAL3_3B: Config = {
    "text_config": {
        "model_type": "ministral3",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "tie_word_embeddings": True,
    },
    "vision_config": {"model_type": "pixtral"},
    "tie_word_embeddings": True,
}

# THUDM/chatglm3-6b, config.json.
CHATGLM3_6B: Config = {
    "num_layers": 28,
    "padded_vocab_size": 65024,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "seq_length": 8192,
    "add_qkv_bias": True,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "original_rope": True,
}

# meta-llama/Llama-3.1-8B-Instruct, config.json.
LLAMA_3_1_8B: Config = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

# google/gemma-2-2b, config.json.
GEMMA2_2B: Config = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}

# THUDM/glm-4-9b-hf, config.json.
GLM4_9B: Config = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
}

# HuggingFaceTB/SmolLM3-3B, config.json.
SMOLLM3_3B: Config = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
