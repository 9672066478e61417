import json
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.errors import ConfigError, GeometryError, KVPolicyError, OptionError
from kvpolicy.models import dtype_from_config, geometry_from_config, load_config
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec

MODELS = Path(__file__).parent / "models"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def changed(base, /, **keys):
    """The config with other keys; a value of ... removes the key."""
    return {key: value for key, value in {**base, **keys}.items() if value is not ...}


def llama(**keys):
    return changed(LLAMA, **keys)


def attention(kv_heads, head, v_head=None, itemsize=2, block_size=16):
    return AttentionSpec(
        block_size=block_size,
        total_kv_heads=kv_heads,
        head_size=head,
        v_head_size=v_head,
        itemsize=itemsize,
    )


def indices(geometry, group):
    """The layer numbers of a group."""
    names = next(g.layer_names for g in geometry.groups if g.name == group)
    return [int(name.split(".")[2]) for name in names]


def specs(geometry, group):
    """The distinct specs of a group."""
    names = next(g.layer_names for g in geometry.groups if g.name == group)
    return {geometry.layers[name] for name in names}


def group_names(geometry):
    return [group.name for group in geometry.groups]


def refused(config, key, **arguments):
    """The text of the ConfigError that the config gives, which blames ``key``."""
    with pytest.raises(ConfigError) as caught:
        geometry_from_config(config, **arguments)
    assert caught.value.key == key
    assert key in str(caught.value)
    return str(caught.value)


# --- real models


@pytest.mark.parametrize(
    ("name", "count", "kv_heads", "head"),
    [
        ("qwen3-30b-a3b", 48, 4, 128),
        ("qwen3-235b-a22b", 94, 4, 128),
        ("qwen2.5-0.5b", 24, 2, 64),  # 896 / 14
        ("llama-3.1-70b", 80, 8, 128),  # 8192 / 64
        ("mixtral-8x7b", 32, 8, 128),  # 4096 / 32
        ("glm-4.5-air", 46, 8, 128),
        ("glm-4.6", 92, 8, 128),
    ],
)
def test_uniform_models_are_one_full_group(name, count, kv_heads, head):
    config = load_config(MODELS / f"{name}.json")
    geometry = geometry_from_config(config)
    assert list(geometry.layers) == [f"model.layers.{i}.self_attn.attn" for i in range(count)]
    assert group_names(geometry) == ["full"]
    assert set(geometry.layers.values()) == {attention(kv_heads, head)}
    assert geometry.num_blocks == 1024
    assert dtype_from_config(config) == "bfloat16"


def test_deepseek_v3_keeps_latents_of_576_elements():
    geometry = geometry_from_config(load_config(MODELS / "deepseek-v3.json"))
    assert len(geometry.layers) == 61
    assert group_names(geometry) == ["latent"]
    assert set(geometry.layers.values()) == {LatentSpec(block_size=16, row_bytes=1152)}


def test_gemma_3_has_a_full_layer_after_five_sliding_ones():
    geometry = geometry_from_config(load_config(MODELS / "gemma-3-27b.json"))
    assert group_names(geometry) == ["sliding", "full"]
    assert indices(geometry, "full") == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    assert len(indices(geometry, "sliding")) == 52
    assert set(geometry.layers.values()) == {attention(16, 128)}


def test_gpt_oss_alternates_from_a_sliding_layer():
    geometry = geometry_from_config(load_config(MODELS / "gpt-oss-20b.json"))
    assert group_names(geometry) == ["sliding", "full"]
    assert indices(geometry, "sliding") == list(range(0, 24, 2))
    assert set(geometry.layers.values()) == {attention(8, 64)}


def test_every_model_is_covered():
    names = {path.stem for path in MODELS.glob("*.json")}
    assert names == {
        *("qwen3-30b-a3b", "qwen3-235b-a22b", "qwen2.5-0.5b", "llama-3.1-70b", "mixtral-8x7b"),
        *("glm-4.5-air", "glm-4.6", "deepseek-v3", "gemma-3-27b", "gpt-oss-20b"),
    }


# --- arguments


def test_sizes_and_packing_pass_through():
    geometry = geometry_from_config(
        llama(), 128, "float32", 7, kv_packing="split", kernel_block_size=64
    )
    assert geometry.num_blocks == 7
    assert set(geometry.layers.values()) == {
        AttentionSpec(
            block_size=128,
            total_kv_heads=2,
            head_size=128,
            itemsize=4,
            kv_packing="split",
            kernel_block_size=64,
        )
    }
    latent = llama(kv_lora_rank=512, qk_rope_head_dim=64)
    geometry = geometry_from_config(latent, 32, "fp8", kv_packing="split", kernel_block_size=16)
    assert set(geometry.layers.values()) == {
        LatentSpec(block_size=32, row_bytes=576, kernel_block_size=16)
    }


def test_split_halves_must_be_equal():
    with pytest.raises(GeometryError, match=r"head_size is 128 and v_head_size 64"):
        geometry_from_config(llama(v_head_dim=64), kv_packing="split")


@pytest.mark.parametrize("tp", [0, -1, True, 1.0, "2", 4097])
def test_tp_is_checked(tp):
    with pytest.raises(GeometryError, match=r"tp is a whole number between 1 and 4,096"):
        geometry_from_config(llama(), tp=tp)


def test_stages_count_the_models_layers():
    assert geometry_from_config(llama(), stages=[1, 3]).stages == (1, 3)
    # Falcon-H1 keeps two caches a layer, an MLP-only layer none.
    assert geometry_from_config(FALCON_H1, stages=[16, 20]).stages == (32, 40)
    assert geometry_from_config(nemotron_h("M-*E"), stages=[2, 2]).stages == (1, 1)


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([2, 3], "the stages hold 5 layers; the model has 4"),
        ([4, 0], "a stage holds a whole number of layers >= 1, not 0"),
        ([True, 3], "not True"),
        (4.5, "not 4.5"),
        ([10**5000], "a number of 16,610 bits layers"),
    ],
)
def test_stages_are_checked(stages, text):
    with pytest.raises(GeometryError) as caught:
        geometry_from_config(llama(), stages=stages)
    assert text in str(caught.value)


def test_a_stage_without_a_cache_is_refused():
    with pytest.raises(GeometryError, match=r"stage 1 holds 2 layers from layer 2 on, none of"):
        geometry_from_config(nemotron_h("M*--"), stages=[2, 2])


# --- dtype


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        (" BF16 ", "bfloat16"),
        ("half", "float16"),
        ("fp16", "float16"),
        ("float", "float32"),
        ("float32", "float32"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("int8", "int8"),
        ("uint8", "uint8"),
    ],
)
def test_dtypes_have_one_plain_name(given, name):
    assert dtype_from_config({}, given) == name
    assert dtype_from_config({"dtype": given}) == name
    assert dtype_from_config({"torch_dtype": given}, "auto") == name


def test_the_argument_wins_then_the_decoder_then_the_config_outside():
    config = {"dtype": "float32", "text_config": {"torch_dtype": "float16", "num_layers": 1}}
    assert dtype_from_config(config, "bfloat16") == "bfloat16"
    assert dtype_from_config(config) == "float16"
    config["text_config"]["torch_dtype"] = "auto"
    assert dtype_from_config(config) == "float32"


@pytest.mark.parametrize("dtype", [..., None, "auto"])
def test_no_dtype_is_refused_with_the_option_to_give(dtype):
    text = refused(llama(torch_dtype=dtype), "dtype")
    assert "pass --dtype, for instance --dtype bfloat16" in text
    nested = {"text_config": llama(torch_dtype=dtype)}
    assert "pass --dtype" in refused(nested, "text_config.dtype")


def test_wrong_dtypes_are_refused():
    text = refused(llama(torch_dtype="bfloat17"), "torch_dtype")
    assert "torch_dtype is 'bfloat17': no cache dtype of that name" in text
    assert "did you mean 'bfloat16'" in text
    assert "dtype is 5: it must be a string" in refused(llama(dtype=5), "dtype")
    text = refused(llama(dtype="float16"), "dtype")
    assert text == "dtype is 'float16': but torch_dtype is 'bfloat16'; drop one of them"
    with pytest.raises(OptionError, match=r"dtype 'flaot16': .*did you mean 'float16'"):
        dtype_from_config(llama(), "flaot16")
    with pytest.raises(OptionError, match="a dtype is given by name, not as int"):
        dtype_from_config(llama(), 16)


# --- plain decoders, by spelling


@pytest.mark.parametrize(
    ("config", "count", "spec"),
    [
        pytest.param(llama(num_key_value_heads=...), 4, attention(8, 128), id="no-kv-heads"),
        pytest.param(llama(num_key_value_heads=None), 4, attention(8, 128), id="null-kv-heads"),
        pytest.param(llama(head_dim=96), 4, attention(2, 96), id="head-dim"),
        pytest.param(
            llama(torch_dtype=..., dtype="float32"), 4, attention(2, 128, None, 4), id="dtype"
        ),
        pytest.param(
            {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float16"},
            12,
            attention(12, 64),
            id="gpt2",
        ),
        pytest.param(
            {
                "model_type": "gpt_bigcode",
                "n_layer": 40,
                "n_head": 48,
                "n_embd": 6144,
                "dtype": "float16",
            },
            40,
            attention(1, 128),
            id="starcoder",
        ),
        pytest.param(
            {
                "model_type": "gpt_bigcode",
                "n_layer": 2,
                "n_head": 4,
                "n_embd": 64,
                "multi_query": False,
                "dtype": "float16",
            },
            2,
            attention(4, 16),
            id="bigcode-multi-head",
        ),
        pytest.param(
            {
                "model_type": "falcon",
                "num_hidden_layers": 32,
                "num_attention_heads": 71,
                "num_kv_heads": 71,
                "hidden_size": 4544,
                "multi_query": True,
                "new_decoder_architecture": False,
                "torch_dtype": "bfloat16",
            },
            32,
            attention(1, 64),
            id="falcon-7b",
        ),
        pytest.param(
            {
                "model_type": "falcon",
                "num_hidden_layers": 60,
                "num_attention_heads": 128,
                "num_kv_heads": 8,
                "hidden_size": 8192,
                "new_decoder_architecture": True,
                "torch_dtype": "bfloat16",
            },
            60,
            attention(8, 64),
            id="falcon-40b",
        ),
        pytest.param(
            {
                "model_type": "RefinedWeb",
                "n_layer": 60,
                "n_head": 128,
                "n_head_kv": 8,
                "hidden_size": 8192,
                "multi_query": False,
                "torch_dtype": "bfloat16",
            },
            60,
            attention(8, 64),
            id="refined-web",
        ),
        pytest.param(
            {
                "model_type": "chatglm",
                "num_layers": 28,
                "num_attention_heads": 32,
                "hidden_size": 4096,
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "torch_dtype": "float16",
            },
            28,
            attention(2, 128),
            id="chatglm3",
        ),
        pytest.param(
            {
                "model_type": "mpt",
                "n_layers": 32,
                "n_heads": 32,
                "d_model": 4096,
                "attn_config": {"attn_type": "multihead_attention"},
                "torch_dtype": "bfloat16",
            },
            32,
            attention(32, 128),
            id="mpt",
        ),
        pytest.param(
            {
                "n_layers": 2,
                "n_heads": 32,
                "d_model": 4096,
                "attn_config": {"attn_type": "multiquery_attention"},
                "torch_dtype": "bfloat16",
            },
            2,
            attention(1, 128),
            id="mpt-multi-query",
        ),
        pytest.param(
            {
                "model_type": "dbrx",
                "n_layers": 40,
                "n_heads": 48,
                "d_model": 6144,
                "attn_config": {"kv_n_heads": 8},
                "torch_dtype": "bfloat16",
            },
            40,
            attention(8, 128),
            id="dbrx",
        ),
        pytest.param(
            {
                "model_type": "gpt_neo",
                "num_layers": 2,
                "num_heads": 16,
                "hidden_size": 2048,
                "attention_layers": ["global", "global"],
                "torch_dtype": "float32",
            },
            2,
            attention(16, 128, None, 4),
            id="gpt-neo",
        ),
        pytest.param(
            llama(use_mla=False, kv_lora_rank=None, v_head_dim=0), 4, attention(2, 128), id="no-mla"
        ),
        # Gemma's head size is no quotient; published configs leave it to the class.
        pytest.param(
            {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text",
                    "num_hidden_layers": 48,
                    "hidden_size": 3840,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 8,
                    "sliding_window": 1024,
                },
                "torch_dtype": "bfloat16",
            },
            48,
            attention(8, 256),
            id="gemma3-12b",
        ),
        pytest.param(
            {
                "text_config": {
                    "model_type": "gemma3_text",
                    "num_hidden_layers": 34,
                    "hidden_size": 2560,
                    "sliding_window": 1024,
                },
                "torch_dtype": "bfloat16",
            },
            34,
            attention(4, 256),
            id="gemma3-4b",
        ),
    ],
)
def test_spellings(config, count, spec):
    geometry = geometry_from_config(config)
    assert len(geometry.layers) == count
    assert set(geometry.layers.values()) == {spec}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: {"text_config": text, "vision_config": {"num_hidden_layers": 3}},
        lambda text: {"language_config": text},
        lambda text: {"llm_config": text, "num_hidden_layers": 99},
        lambda text: {"thinker_config": {"text_config": text, "audio_config": {}}},
        lambda text: {"text_config": None, "vision_config": {}, **text},
        lambda text: {"text_config": {}, **text},
    ],
)
def test_the_decoders_section_is_found(wrap):
    assert geometry_from_config(wrap(llama())) == geometry_from_config(llama())


def test_the_outer_dtype_and_model_type_apply_inside():
    config = {
        "model_type": "gemma2",
        "dtype": "float32",
        "text_config": llama(model_type=..., torch_dtype=..., sliding_window=64),
    }
    geometry = geometry_from_config(config)
    assert indices(geometry, "sliding") == [0, 2]
    assert {spec.itemsize for spec in geometry.layers.values()} == {4}


def test_kv_heads_by_layer():
    geometry = geometry_from_config(
        {
            "model_type": "openelm",
            "num_transformer_layers": 3,
            "model_dim": 1280,
            "head_dim": 64,
            "num_kv_heads": [3, 3, 4],
            "num_query_heads": [12, 12, 16],
            "torch_dtype": "bfloat16",
        }
    )
    assert list(geometry.layers.values()) == [attention(n, 64) for n in (3, 3, 4)]
    config = llama(num_key_value_heads=..., num_key_value_heads_per_layer=[4, 2, 1, 4])
    heads = [spec.total_kv_heads for spec in geometry_from_config(config).layers.values()]
    assert heads == [4, 2, 1, 4]


def test_nemotron_nas_blocks():
    blocks = [
        {"attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True}},
        {"attention": {"n_heads_in_group": None, "replace_with_linear": True}},
        {"attention": {"num_key_value_heads": 1}},
    ]
    config = llama(model_type="nemotron-nas", num_key_value_heads=None, block_configs=blocks)
    geometry = geometry_from_config(config)
    assert geometry.layers == {
        "model.layers.0.self_attn.attn": attention(2, 128),
        "model.layers.3.self_attn.attn": attention(1, 128),
    }


# --- kinds of attention


@pytest.mark.parametrize(
    ("keys", "full", "sliding"),
    [
        pytest.param({"sliding_window": 4096}, None, [0, 1, 2, 3], id="mistral-v0.1"),
        pytest.param({"sliding_window": None}, [0, 1, 2, 3], None, id="null"),
        pytest.param({"sliding_window": 0}, [0, 1, 2, 3], None, id="zero"),
        pytest.param(
            {"sliding_window": 9, "use_sliding_window": False}, [0, 1, 2, 3], None, id="off"
        ),
        pytest.param(
            {"model_type": "qwen2", "sliding_window": 9}, [0, 1, 2, 3], None, id="qwen2-default"
        ),
        pytest.param(
            {
                "model_type": "qwen2",
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            [0, 1, 2],
            [3],
            id="qwen2",
        ),
        pytest.param(
            {"sliding_window": 9, "sliding_window_pattern": 2}, [1, 3], [0, 2], id="pattern"
        ),
        pytest.param({"_sliding_window_pattern": 4}, [3], [0, 1, 2], id="private-pattern"),
        pytest.param(
            {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": "LG"},
            [1, 3],
            [0, 2],
            id="letters",
        ),
        pytest.param({"model_type": "gemma2"}, [1, 3], [0, 2], id="gemma2"),
        pytest.param({"model_type": "cohere2"}, [3], [0, 1, 2], id="cohere2"),
        pytest.param(
            {"model_type": "gemma2", "sliding_window": None}, [0, 1, 2, 3], None, id="gemma2-null"
        ),
        pytest.param({"global_attn_every_n_layers": 2}, [1, 3], [0, 2], id="afmoe"),
        pytest.param(
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9},
            [1, 3],
            [0, 2],
            id="layer-types",
        ),
        pytest.param({"attention_types": [[["global", "local"], 2]]}, [0, 2], [1, 3], id="gpt-neo"),
        pytest.param({"attn_type_list": [1, 1, 1, 1]}, [0, 1, 2, 3], None, id="minimax-m2"),
        pytest.param(
            {"model_type": "mimo_v2", "attention_chunk_size": 128},
            [0, 1, 2, 3],
            None,
            id="no-chunks",
        ),
    ],
)
def test_sliding_windows(keys, full, sliding):
    geometry = geometry_from_config(llama(head_dim=128, **keys))
    expected = {name: rows for name, rows in (("full", full), ("sliding", sliding)) if rows}
    assert {group: indices(geometry, group) for group in group_names(geometry)} == expected
    assert set(geometry.layers.values()) == {attention(2, 128)}


def test_latents_with_sliding_windows():
    config = llama(kv_lora_rank=96, qk_rope_head_dim=32, sliding_window=8, sliding_window_pattern=2)
    geometry = geometry_from_config(config)
    assert group_names(geometry) == ["latent-sliding", "latent"]
    assert indices(geometry, "latent") == [1, 3]
    assert set(geometry.layers.values()) == {LatentSpec(block_size=16, row_bytes=256)}


def test_llama_4_attends_in_chunks_where_it_has_rotary_positions():
    text = llama(model_type="llama4_text", attention_chunk_size=8192, no_rope_layer_interval=4)
    geometry = geometry_from_config({"model_type": "llama4", "text_config": text})
    assert group_names(geometry) == ["chunked", "full"]
    assert indices(geometry, "full") == [3]
    text = changed(text, no_rope_layers=[0, 1, 1, 0])
    assert indices(geometry_from_config(text), "full") == [0, 3]
    text = changed(text, attention_chunk_size=None)
    assert group_names(geometry_from_config(text)) == ["full"]


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({}, [3, 7]),
        ({"no_rope_layers": []}, [3, 7]),
        ({"no_rope_layers": [], "no_rope_layer_interval": 3}, [2, 5]),
        ({"no_rope_layers": [1] * 8}, []),
    ],
)
def test_llama_4_without_a_list_has_its_configuration_class_s_own(keys, full):
    config = llama(model_type="llama4_text", attention_chunk_size=8192, num_hidden_layers=8, **keys)
    assert [
        i for i in range(8) if i not in indices(geometry_from_config(config), "chunked")
    ] == full


def test_mimo_v2_has_other_heads_in_sliding_layers_and_narrow_values():
    geometry = geometry_from_config(
        {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 4,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "sliding_window": 128,
            "attention_chunk_size": 128,
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "torch_dtype": "bfloat16",
        }
    )
    assert indices(geometry, "sliding") == [1, 2]
    assert specs(geometry, "full") == {attention(4, 192, 128)}
    assert specs(geometry, "sliding") == {attention(8, 192, 128)}


def test_gemma_4_has_other_heads_in_full_layers_and_shared_caches():
    text = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 5 + ["sliding_attention"] * 2,
        "num_kv_shared_layers": 2,
        "dtype": "bfloat16",
    }
    geometry = geometry_from_config({"model_type": "gemma4", "text_config": text})
    assert len(geometry.layers) == 10
    assert specs(geometry, "sliding") == {attention(4, 256)}
    assert specs(geometry, "full") == {attention(2, 512)}
    geometry = geometry_from_config(changed(text, num_kv_shared_layers=0, attention_k_eq_v=False))
    assert indices(geometry, "full")[-1] == 11  # forced
    assert specs(geometry, "full") == {attention(4, 512)}


def test_gemma_3n_shares_the_caches_of_its_last_layers():
    geometry = geometry_from_config(
        {
            "model_type": "gemma3n",
            "text_config": {
                "model_type": "gemma3n_text",
                "num_hidden_layers": 35,
                "num_kv_shared_layers": 15,
                "hidden_size": 2048,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "sliding_window": 512,
                "torch_dtype": "bfloat16",
            },
        }
    )
    assert indices(geometry, "full") == [4, 9, 14, 19]
    assert len(geometry.layers) == 20


# --- recurrent families

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}
MAMBA = {
    "model_type": "mamba",
    "num_hidden_layers": 24,
    "hidden_size": 768,
    "expand": 2,
    "state_size": 16,
    "conv_kernel": 4,
    "torch_dtype": "float32",
}
MAMBA2 = {
    "model_type": "mamba2",
    "num_hidden_layers": 64,
    "hidden_size": 4096,
    "expand": 2,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}
JAMBA = {
    "model_type": "jamba",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}
BAMBA = {
    "model_type": "bamba",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_expand": 2,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 4] * 4,
    "mamba_expand": 2,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}
FALCON_H1 = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 36,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_expand": 2,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}
LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_dim": 2048,
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "torch_dtype": "bfloat16",
}


def nemotron_h(pattern, **keys):
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "torch_dtype": "bfloat16",
        **keys,
    }


# Bytes worked by hand: convolution elements * item + temporal elements * item.
@pytest.mark.parametrize(
    ("config", "tp", "state_bytes"),
    [
        # (2*16*128 + 32*128) * 3 = 24,576 and 32*128*128 = 524,288 elements
        pytest.param(QWEN3_NEXT, 1, 2 * (24_576 + 524_288), id="qwen3-next"),
        pytest.param(QWEN3_NEXT, 2, 548_864, id="qwen3-next-tp2"),
        pytest.param(
            changed(QWEN3_NEXT, model_type="qwen3_5_text", mamba_ssm_dtype="float32"),
            1,
            2096 * 1024,
            id="qwen3.5",
        ),
        # 1536 * 3 + 1536 * 16
        pytest.param(MAMBA, 1, 116_736, id="mamba"),
        pytest.param(
            changed(MAMBA, model_type="falcon_mamba", expand=16, intermediate_size=8192),
            1,
            4 * 8192 * 19,
            id="falcon-mamba",
        ),
        # (8192 + 2*8*128) * 3 = 30,720 and 128*64*128 = 1,048,576
        pytest.param(MAMBA2, 1, 2_158_592, id="mamba2"),
        pytest.param(MAMBA2, 8, 269_824, id="mamba2-tp8"),
        pytest.param(JAMBA, 1, 311_296, id="jamba"),
        # (8192 + 2*128) * 3; at tp 2 each rank keeps the one group: (4096 + 2*128) * 3
        pytest.param(BAMBA, 1, 2 * (25_344 + 1_048_576), id="bamba"),
        pytest.param(BAMBA, 2, 2 * (13_056 + 524_288), id="bamba-tp2"),
        pytest.param(GRANITE, 1, 2 * (9_984 + 393_216), id="granite"),
        pytest.param(FALCON_H1, 1, 2 * (5_376 + 196_608), id="falcon-h1"),
        pytest.param(
            changed(FALCON_H1, mamba_d_ssm=None, mamba_n_heads=32, mamba_d_head=64),
            1,
            2 * ((2048 + 256) * 3 + 32 * 64 * 128),
            id="falcon-h1-expand",
        ),
        # The temporal state is float32 unless the config says otherwise.
        pytest.param(nemotron_h("M*"), 1, 2 * 30_720 + 4 * 1_048_576, id="nemotron-h"),
        pytest.param(
            nemotron_h("M*", mamba_ssm_cache_dtype="float16"),
            1,
            2 * (30_720 + 1_048_576),
            id="nemotron-h-float16",
        ),
        pytest.param(LFM2, 1, 2048 * 2 * 2, id="lfm2"),
        pytest.param(changed(LFM2, conv_dim=...), 4, 512 * 2 * 2, id="lfm2-tp4"),
    ],
)
def test_recurrent_state(config, tp, state_bytes):
    geometry = geometry_from_config(config, tp=tp)
    assert specs(geometry, "state") == {StateSpec(state_bytes=state_bytes)}


@pytest.mark.parametrize(
    ("config", "part", "full", "spec"),
    [
        (QWEN3_NEXT, "linear_attn", list(range(3, 48, 4)), attention(2, 256)),
        (JAMBA, "mixer", [4, 12, 20, 28], attention(8, 128)),
        (BAMBA, "mixer", [9, 18, 27], attention(8, 128)),
        (GRANITE, "mixer", [5, 15, 25, 35], attention(4, 128)),
        (LFM2, "conv", [2, 5, 8, 10, 12, 14], attention(8, 64)),
    ],
    ids=["qwen3-next", "jamba", "bamba", "granite", "lfm2"],
)
def test_hybrids_have_a_group_of_each(config, part, full, spec):
    geometry = geometry_from_config(config)
    assert group_names(geometry) == ["state", "full"]
    assert indices(geometry, "full") == full
    assert specs(geometry, "full") == {spec}
    state = next(group.layer_names for group in geometry.groups if group.name == "state")
    assert state[0] == f"model.layers.0.{part}"
    assert len(geometry.layers) == config["num_hidden_layers"]


def test_purely_recurrent_models_need_no_heads():
    geometry = geometry_from_config(MAMBA)
    assert group_names(geometry) == ["state"]
    assert list(geometry.layers)[23] == "model.layers.23.mixer"


def test_falcon_h1_has_two_caches_a_layer():
    geometry = geometry_from_config(FALCON_H1)
    assert list(geometry.layers)[:3] == [
        "model.layers.0.self_attn.attn",
        "model.layers.0.mixer",
        "model.layers.1.self_attn.attn",
    ]
    assert group_names(geometry) == ["full", "state"]
    assert len(geometry.layers) == 72


def test_nemotron_h_names_layers_by_their_place_in_the_model():
    geometry = geometry_from_config(nemotron_h("M-M-E*-", num_hidden_layers=7))
    assert list(geometry.layers) == [
        "model.layers.0.mixer",
        "model.layers.2.mixer",
        "model.layers.5.self_attn.attn",
    ]
    blocks = ["linear_attention", "moe", "full_attention", "mlp"]
    config = nemotron_h(None, layers_block_type=blocks)
    assert list(geometry_from_config(config).layers) == [
        "model.layers.0.mixer",
        "model.layers.2.self_attn.attn",
    ]


def test_an_8_bit_cache_dtype_leaves_the_state_in_the_models():
    wide = specs(geometry_from_config(JAMBA), "state")
    narrow = geometry_from_config(JAMBA, dtype="fp8")
    assert specs(narrow, "state") == wide
    assert specs(narrow, "full") == {attention(8, 128, None, 1)}
    assert specs(geometry_from_config(JAMBA, dtype="float32"), "state") == {
        StateSpec(state_bytes=622_592)
    }
    text = refused(changed(JAMBA, torch_dtype=...), "dtype", dtype="fp8")
    assert "recurrent state has the model's dtype" in text


# --- refusals: key, and what the sentence says


@pytest.mark.parametrize(
    ("config", "key", "text"),
    [
        (llama(num_hidden_layers=...), "num_hidden_layers", "is missing (also spelled n_layer, "),
        (llama(num_hidden_layers=0), "num_hidden_layers", "it must lie between 1 and 4,096"),
        (llama(num_hidden_layers=10**6), "num_hidden_layers", "is 1000000: it must lie between"),
        (llama(num_hidden_layers=True), "num_hidden_layers", "is True: it must be a whole number"),
        (llama(num_hidden_layers=4.0), "num_hidden_layers", "is 4.0: it must be a whole number"),
        (llama(num_hidden_layers="4"), "num_hidden_layers", "is '4': it must be a whole number"),
        (llama(num_hidden_layers=[4]), "num_hidden_layers", "is a list of 1: it must be a whole"),
        (llama(num_hidden_layers={"a": 1}), "num_hidden_layers", "is an object of 1 keys"),
        (llama(num_hidden_layers=10**5000), "num_hidden_layers", "is a number of 16,610 bits"),
        (llama(num_hidden_layers="x" * 99), "num_hidden_layers", f"is '{'x' * 56}...: it must"),
        (
            llama(n_layer=5),
            "num_hidden_layers",
            "is 4: but n_layer is 5, and both mean the same thing; make them 4 or 5, or drop one",
        ),
        (llama(num_kv_heads=4), "num_key_value_heads", "is 2: but num_kv_heads is 4"),
        (llama(num_key_value_heads=0), "num_key_value_heads", "it must lie between 1 and 65,536"),
        (llama(num_key_value_heads=-2), "num_key_value_heads", "is -2: it must lie between"),
        (llama(head_dim=0), "head_dim", "it must lie between 1 and"),
        (llama(head_dim=True), "head_dim", "must be a whole number"),
        (llama(v_head_dim="a"), "v_head_dim", "must be a whole number"),
        (llama(hidden_size=...), "hidden_size", "without head_dim, the head size is hidden size"),
        (
            llama(num_attention_heads=...),
            "num_attention_heads",
            "without head_dim, the head size is hidden size over attention heads",
        ),
        (
            llama(num_attention_heads=..., num_key_value_heads=..., head_dim=64),
            "num_attention_heads",
            "the head count must be given",
        ),
        (llama(hidden_size=1001), "hidden_size", "8 attention heads do not divide it"),
        (llama(multi_query="yes"), "multi_query", "it must be true or false"),
        (
            llama(multi_query_attention=True),
            "multi_query_group_num",
            "multi_query_attention is true and needs it",
        ),
        (llama(attn_config=3), "attn_config", "it must be an object"),
        (
            llama(attn_config={"attn_type": "grouped_query_attention"}),
            "attn_config.kv_n_heads",
            "attn_type is grouped_query_attention",
        ),
        (llama(attn_config={"kv_n_heads": 0}), "attn_config.kv_n_heads", "between 1 and 65,536"),
        (
            llama(num_key_value_heads=[1, 2]),
            "num_key_value_heads",
            "is a list of 2: but the model has 4 layers; it needs one item a layer",
        ),
        (
            llama(num_key_value_heads=[1, 2, 3, None]),
            "num_key_value_heads",
            "layer 3 has None KV heads; possible: 1 to 65,536",
        ),
        (llama(model_type=7), "model_type", "it must be a string"),
        (
            llama(model_type="bert"),
            "model_type",
            "is 'bert': it is an encoder, which keeps no KV cache",
        ),
        (llama(is_encoder_decoder=True), "is_encoder_decoder", "possible: decoder-only models"),
        (llama(model_type="longcat_flash"), "model_type", "has several caches or attentions"),
        (llama(model_type="recurrent_gemma"), "model_type", "has recurrent state whose size"),
        (llama(kv_lora_rank=512), "qk_rope_head_dim", "kv_lora_rank says that the cache holds"),
        (llama(kv_lora_rank=0), "kv_lora_rank", "it must lie between 1"),
        (llama(index_topk=2048), "index_topk", "the sparse indexer keeps a second cache"),
        (llama(compress_ratios=[4]), "compress_ratios", "several caches a layer"),
        (llama(cross_attention_layers=[3]), "cross_attention_layers", "the image's tokens"),
        (llama(layer_types="full"), "layer_types", "it must be a list"),
        (
            llama(layer_types=["full_attention"]),
            "layer_types",
            "but the model has 4 layers; it needs one item a layer",
        ),
        (
            llama(layer_types=["full_atention"] * 4),
            "layer_types",
            "layer 0 is of the unknown kind 'full_atention'; did you mean 'full_attention'",
        ),
        (llama(layer_types=[None] * 4), "layer_types", "layer 0 is of the unknown kind None"),
        (
            llama(hybrid_layer_pattern=[0, 1, 2, 0]),
            "hybrid_layer_pattern",
            "layer 2 is of the unknown kind 2; known: 0, 1",
        ),
        (llama(hybrid_layer_pattern=[0, True, 0, 0]), "hybrid_layer_pattern", "kind True"),
        (
            llama(layer_types=["linear_attention"] * 4),
            "model_type",
            "is 'llama', which has recurrent layers of a kind whose state cannot be sized",
        ),
        (llama(sliding_window="big"), "sliding_window", "it must be a whole number"),
        (llama(sliding_window=-1), "sliding_window", "it must lie between 0"),
        (llama(sliding_window=8, use_sliding_window=1), "use_sliding_window", "true or false"),
        (llama(sliding_window=8, sliding_window_pattern=0), "sliding_window_pattern", "between 1"),
        (
            llama(sliding_window=8, sliding_window_pattern=""),
            "sliding_window_pattern",
            "one letter",
        ),
        (
            llama(sliding_window=8, sliding_window_pattern="LX"),
            "sliding_window_pattern",
            "layer 1 is of the unknown kind 'X'",
        ),
        (
            llama(model_type="qwen2", sliding_window=8, use_sliding_window=True),
            "max_window_layers",
            "the window begins at that layer",
        ),
        (
            llama(model_type="mimo_v2", sliding_window=8),
            "hybrid_layer_pattern",
            "it says which layers have the sliding window",
        ),
        (llama(attention_chunk_size=8192), "attention_chunk_size", "give layer_types"),
        (
            llama(model_type="llama4_text", attention_chunk_size=8, no_rope_layers=[1, 0]),
            "no_rope_layers",
            "but the model has 4 layers",
        ),
        (
            llama(model_type="gemma3n_text"),
            "num_kv_shared_layers",
            "the last so many layers have no cache of their own",
        ),
        (
            llama(num_kv_shared_layers=4),
            "num_kv_shared_layers",
            "it must be less than the 4 layers",
        ),
        (llama(model_type="gemma4_text"), "global_head_dim", "heads of that size"),
        (llama(attention_types=[1]), "attention_types", "each item must be [[kinds], times]"),
        (llama(attention_types=[[["global"], -1]]), "attention_types", "-1 is not a number of"),
        (llama(attention_types=[[["global"], 9]]), "attention_types", "more than the model's 4"),
        (llama(attention_types=[[["global"], 3]]), "attention_types", "it covers 3 layers"),
        (llama(attn_layer_indices=[4]), "attn_layer_indices", "4 is not one of the 4 layers"),
        (changed(JAMBA, attn_layer_offset=...), "attn_layer_offset", "attn_layer_period needs it"),
        (changed(JAMBA, attn_layer_offset=8), "attn_layer_offset", "less than the period, 8"),
        (changed(JAMBA, attn_layer_period=...), "attn_layer_period", "which layers are recurrent"),
        (llama(block_configs=[{}] * 4), "block_configs", "layer 0 has no object 'attention'"),
        (
            llama(block_configs=[{"attention": {"n_heads_in_group": 3}}] * 4),
            "block_configs[0].n_heads_in_group",
            "it does not divide 8 attention heads",
        ),
        (
            llama(block_configs=[{"attention": {"window_length": 8}}] * 4),
            "block_configs[0].window_length",
            "cannot be derived from block_configs",
        ),
        (
            llama(block_configs=[{"attention": {"no_op": True}}] * 4),
            "layer_types",
            "no layer of the model has a cache",
        ),
        (nemotron_h("MX"), "hybrid_override_pattern", "unknown kind 'X'"),
        (
            nemotron_h("M*", num_hidden_layers=3),
            "hybrid_override_pattern",
            "2 letters for 3 layers",
        ),
        (nemotron_h(""), "hybrid_override_pattern", "a model has 1 to 4,096 layers, not 0"),
        (
            changed(MAMBA, state_size=...),
            "state_size",
            "the size of the recurrent state follows from it",
        ),
        (changed(MAMBA, mamba_ssm_dtype="f99"), "mamba_ssm_dtype", "no cache dtype of that name"),
        (
            changed(BAMBA, mamba_n_heads=3),
            "mamba_n_heads",
            "it must divide the mixer's width, 8,192",
        ),
        (changed(BAMBA, mamba_d_head=32), "mamba_d_head", "128 heads of it are not the mixer's"),
        (changed(LFM2, conv_L_cache=1), "conv_L_cache", "has no state; it must be 2 or more"),
        ({"text_config": 3}, "text_config", "it must be an object"),
        ({"text_config": llama(head_dim=-1)}, "text_config.head_dim", "is -1: it must lie between"),
    ],
)
def test_refused_by_key(config, key, text):
    assert text in refused(config, key)


@pytest.mark.parametrize("section", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("kv_cache_scheme", {"num_bits": 8, "type": "float"}, "an object of 2 keys"),
        ("kv_cache_quant_algo", "FP8", "'FP8'"),
    ],
)
def test_a_quantised_cache_is_refused_unless_its_dtype_is_given(section, key, value, found):
    quantised = {section: {"quant_method": "modelopt", key: value}}
    config = llama(**quantised)
    said = f"{section}.{key} is {found}: so the cache is quantised; pass the cache's own type"
    assert said in refused(config, f"{section}.{key}")
    assert "--dtype fp8" in refused(config, f"{section}.{key}", dtype="auto")
    (spec, *_) = geometry_from_config(config, dtype="fp8").layers.values()
    assert spec.itemsize == 1
    outside = {"text_config": llama(), **quantised}
    assert said in refused(outside, f"{section}.{key}")
    # Recurrent state has the model's dtype whatever the cache's is.
    hybrid = changed(LFM2, **quantised)
    assert geometry_from_config(hybrid, dtype="fp8") == geometry_from_config(LFM2, dtype="fp8")


def test_a_quantised_model_whose_cache_is_not_is_none_of_that():
    config = llama(quantization_config={"quant_method": "fp8", "kv_cache_scheme": None})
    assert geometry_from_config(config) == geometry_from_config(llama())


def test_sections_nested_too_deeply_are_refused():
    config = llama()
    for _ in range(6):
        config = {"text_config": config}
    key = "text_config.text_config.text_config.text_config.text_config"
    assert "nested too deeply" in refused(config, key)


@pytest.mark.parametrize(
    ("config", "tp", "key", "text"),
    [
        (QWEN3_NEXT, 3, "linear_num_key_heads", "16 cannot be split evenly over tp 3"),
        (QWEN3_NEXT, 32, "linear_num_key_heads", "possible tp: 1, 2, 4, 8, 16"),
        (MAMBA2, 16, "n_groups", "8 cannot be split evenly over tp 16"),
        (JAMBA, 3, "mamba_expand", "8,192 cannot be split evenly over tp 3"),
        (LFM2, 3, "conv_dim", "2,048 cannot be split evenly over tp 3"),
        (MAMBA, 5, "intermediate_size", "1,536 cannot be split evenly over tp 5"),
    ],
)
def test_state_that_does_not_divide_is_refused(config, tp, key, text):
    assert text in refused(config, key, tp=tp)


@pytest.mark.parametrize("mapping", [None, [], "{}", 3])
def test_a_config_is_an_object(mapping):
    assert "a model's config is a JSON object, not" in refused(mapping, "")


# --- files


def test_load_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(llama()).encode())  # some editors write a mark
    assert load_config(path) == load_config(str(path)) == llama()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (json.dumps(llama())[:-7].encode(), "is not whole JSON: "),
        (b"", "is empty; give a model's config.json"),
        (b" \n", "is empty; give a model's config.json"),
        (b"\xff\xfe{", "is not UTF-8 text (byte 0)"),
        (b"[1]", "holds a JSON array; a config.json is an object"),
        (b'"a"', "holds a JSON string"),
        (b"null", "holds a JSON null"),
        (b"true", "holds a JSON boolean"),
        (b"1.5", "holds a JSON number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not whole JSON: "),
        (b"[" * 200_000, "is nested too deeply"),
    ],
)
def test_unreadable_files(tmp_path, content, text):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.key == ""
    assert str(caught.value).startswith(str(path))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"head_dim": 64, "hidden_size": 8, "head_dim": 128}', "head_dim"),
        ('{"head_dim": 64, "head_dim": 64}', "head_dim"),
        (
            '{"text_config": {"a": 1, "num_hidden_layers": 4, "num_hidden_layers": 5}}',
            "num_hidden_layers",
        ),
        ('[{"": 1, "": 2}]', ""),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path, text, key):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.key == key
    assert str(caught.value) == f"{path} has the key {key!r} twice; drop one of them"


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file; give the path of a config\.json"):
        load_config(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match=r"is a directory; give the path of the config\.json"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: "):
        load_config(tmp_path / "config.json\0")


def test_absurdly_large_files_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ConfigError, match=r"larger than 67,108,864 bytes.*give the weights\?"):
        load_config(path)


# --- any JSON leads to a geometry or to a refusal

SEEDS = [
    *(json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))),
    llama(),
    llama(block_configs=[{"attention": {"n_heads_in_group": 4}}] * 4),
    *(QWEN3_NEXT, MAMBA, MAMBA2, JAMBA, BAMBA, GRANITE, FALCON_H1, LFM2, nemotron_h("M-*E")),
]
KEYS = sorted(
    {key for seed in SEEDS for key in seed}
    | {
        *("n_layer", "n_head", "num_kv_heads", "kv_channels", "v_head_dim", "swa_head_dim"),
        *("text_config", "llm_config", "layer_types", "hybrid_layer_pattern", "attn_type_list"),
        *("attention_types", "attention_layers", "full_attn_idxs", "no_rope_layers", "index_topk"),
        *("attention_chunk_size", "sliding_window_pattern", "max_window_layers", "multi_query"),
        *("num_kv_shared_layers", "global_head_dim", "attn_config", "multi_query_attention"),
        *("use_sliding_window", "mamba_ssm_dtype", "dtype", "is_encoder_decoder", "use_mla"),
    }
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.sampled_from([2**31, 2**63, 10**30, -(10**30), 4096, 4097, 65_537])
    | st.floats()
    | st.text(string.printable, max_size=5)
    | st.sampled_from(["auto", "full_attention", "linear_attention", "mamba", "llama4", "gemma4"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def derived(config, tp):
    """The geometry, or None where it is refused by a typed error that has a text."""
    try:
        dtype_from_config(config)
        geometry = geometry_from_config(config, tp=tp)
    except KVPolicyError as error:
        text = str(error)
    else:
        return geometry
    assert 5 < len(text) < 2000
    return None


@settings(derandomize=True, max_examples=600, deadline=None)
@given(st.sampled_from(SEEDS), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4), st.data())
def test_any_values_give_a_geometry_or_a_typed_refusal(seed, values, data):
    removed = data.draw(st.sets(st.sampled_from(sorted(seed)), max_size=2))
    config = {key: value for key, value in {**seed, **values}.items() if key not in removed}
    geometry = derived(config, data.draw(st.sampled_from([1, 2, 3])))
    if geometry is not None:
        grouped = [name for group in geometry.groups for name in group.layer_names]
        assert sorted(grouped) == sorted(geometry.layers)


@pytest.mark.parametrize("key", KEYS)
@settings(derandomize=True, max_examples=25, deadline=None)
@given(value=JSON)
def test_any_value_under_each_key(key, value):
    for seed in SEEDS[::2]:
        derived({**seed, key: value}, 2)


@pytest.mark.parametrize("key", KEYS)
def test_numbers_that_cannot_even_be_printed(key):
    huge = 10**5000
    for seed in SEEDS:
        for value in (huge, -huge, [huge], {"a": huge}, {"attn_type": huge, "num_layers": huge}):
            derived({**seed, key: value}, 2)


def test_state_too_large_for_any_rank_is_refused():
    config = changed(QWEN3_NEXT, linear_key_head_dim=2**20, linear_value_head_dim=2**20)
    with pytest.raises(GeometryError, match=r"StateSpec\.state_bytes lies between 1 and"):
        geometry_from_config(config)
