"""Small random models of every family of transformers that is imported."""

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LACKING = {
    "gpt2": ("intermediate_size", "num_key_value_heads", "max_position_embeddings"),
    "gpt_neox": ("num_key_value_heads",),
}
SCALED = {"original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, **SCALED}
RAMP = {"beta_fast": 1.5, "beta_slow": 0.25}
LONG = {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
LONG |= {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 4.0]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # model_type -> the beginning of its classes' names, more options
    "gpt2": ("GPT2", {"n_positions": 64, "n_inner": 80}),
    "llama": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3 | SCALED, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3} | RAMP}),
    "olmo3": ("Olmo3", {"sliding_window": 7}),
    "smollm3": ("SmolLM3", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 500.0, "factor": 1.0},
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 7}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "phi3": ("Phi3", {"rope_parameters": LONG, "tie_word_embeddings": True, **SCALED}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 9}),
    "gemma3_text": ("Gemma3", {"head_dim": 16, "sliding_window": 7, "num_key_value_heads": 1, "num_hidden_layers": 7}),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "nemotron": ("Nemotron", {"head_dim": 16}),
    "arcee": ("Arcee", {"head_dim": 16, "rope_parameters": YARN}),
    "cohere2": ("Cohere2", {"sliding_window": 7}),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "gpt_neox": ("GPTNeoX", {"hidden_size": 64}),
}


def config_of(name: str, **changes: Any) -> Any:
    begins, options = FAMILIES[name]
    suffix = "Text" if name == "gemma3_text" else ""
    sizes = {key: value for key, value in SIZES.items() if key not in LACKING.get(name, ())}
    return getattr(transformers, f"{begins}{suffix}Config")(**sizes | options | changes)


def model_of(name: str, **changes: Any) -> Any:
    """A model with random weights, also where transformers begins with constants: norms and biases."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, **changes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(values + 1.0 * (parameter.dim() == 1))
    return model.eval()
