"""Small seeded models on disk: with dummy weights no corruption would change a token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Four of six layers slide over 256 tokens, so that vLLM makes several cache groups.
GEMMA3 = QWEN3 | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 256,
    "sliding_window_pattern": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_local_base_freq": 10000.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
# Latents of the one size that vLLM's kernels on the CPU know; no layer has experts.
DEEPSEEK = {name: value for name, value in QWEN3.items() if name != "head_dim"} | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
MODELS = {"qwen3": QWEN3, "gemma3": GEMMA3, "deepseek": DEEPSEEK}

Weight = Callable[..., torch.Tensor]
Weights = Iterator[tuple[str, torch.Tensor]]


def make_model(folder: Path, kind: str, dtype: str) -> Path:
    """Writes the model into a folder of the folder, once; the same weights every time."""
    folder = folder / f"{kind}-{dtype}"
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = MODELS[kind] | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, getattr(torch, dtype)), folder / "model.safetensors")
    return folder


def _weights(config: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(0)
    gemma = config["model_type"] == "gemma3_text"
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    # Gemma multiplies its embeddings by sqrt(hidden), and adds 1 to the weights of its norms.
    embedded = 1.0 if gemma else math.sqrt(hidden)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        scale = gain / math.sqrt(columns)
        return (torch.randn(rows, columns, generator=seeded) * scale).to(dtype)

    def norm(count: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((count,), value - gemma).to(dtype)

    attention = _latent_attention if config["model_type"] == "deepseek_v2" else _attention
    found = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, embedded),
        "model.norm.weight": norm(hidden),
        # Not tied: Gemma would then say its last token again whatever attention brings.
        "lm_head.weight": normal(config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": norm(hidden),
            f"{at}.post_attention_layernorm.weight": norm(hidden),
            **{f"{at}.self_attn.{name}.weight": w for name, w in attention(config, normal, norm)},
            f"{at}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{at}.mlp.up_proj.weight": normal(inner, hidden),
            f"{at}.mlp.down_proj.weight": normal(hidden, inner),
        }
        if gemma:
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                found[f"{at}.{name}.weight"] = norm(hidden)
    return found


# What attention brings must weigh, so that a wrong page shows in the first token: keys, values
# and what is made of them are twice as large as elsewhere.


def _attention(config: dict, normal: Weight, norm: Weight) -> Weights:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * size
    keys = config["num_key_value_heads"] * size
    yield "q_proj", normal(queries, hidden)
    yield "k_proj", normal(keys, hidden, 2.0)
    yield "v_proj", normal(keys, hidden, 2.0)
    yield "o_proj", normal(hidden, queries, 2.0)
    yield "q_norm", norm(size, 2.0)
    yield "k_norm", norm(size, 2.0)


def _latent_attention(config: dict, normal: Weight, norm: Weight) -> Weights:
    hidden, heads, latent = (
        config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    plain, rotated, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    yield "q_proj", normal(heads * (plain + rotated), hidden, 2.0)
    yield "kv_a_proj_with_mqa", normal(latent + rotated, hidden)
    yield "kv_a_layernorm", norm(latent)
    yield "kv_b_proj", normal(heads * (plain + value), latent, 2.0)
    yield "o_proj", normal(hidden, heads * value, 2.0)
