"""From a config's keys to a `CacheGeometry`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpolicy.dtypes import ITEMSIZES
from kvpolicy.errors import ConfigError, GeometryError
from kvpolicy.geometry import CacheGeometry, LayerGroup
from kvpolicy.grid import MAX_RANKS
from kvpolicy.models import dtypes, states
from kvpolicy.models.kinds import Kinds, layer_count, layer_kinds
from kvpolicy.models.reading import Keys, levels, shown
from kvpolicy.models.sizes import Sizes, latent_elements, layer_sizes, without_removed
from kvpolicy.specs import AttentionSpec, KVPacking, LatentSpec, LayerSpec, StateSpec
from kvpolicy.values import is_whole

_ENCODER = "is an encoder, which keeps no KV cache between steps"
_SEVERAL = "has several caches or attentions in a layer, which no spec here describes"
_RECURRENT = "has recurrent state whose size on a rank no reference implementation fixes here"
_REFUSED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("bert", "roberta", "xlm-roberta", "albert", "distilbert", "electra", "mpnet"),
            *("deberta", "deberta-v2", "camembert", "ernie", "modernbert", "nomic_bert"),
            *("longformer", "big_bird", "eurobert", "neobert", "esm", "wav2vec2"),
            *("vit", "clip", "siglip", "siglip2"),
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("longcat_flash", "deepseek_v4", "minicpm3", "zamba", "zamba2", "phi4flash"), _SEVERAL
    ),
    **dict.fromkeys(
        (
            *("recurrent_gemma", "rwkv", "xlstm", "kimi_linear", "plamo2", "minimax"),
            *("minimax_m1", "minimax_text_01", "bailing_hybrid", "olmo_hybrid", "zaya", "lfm3"),
        ),
        _RECURRENT,
    ),
}
# Keys that give a layer more than the caches above, or share one between layers.
_REFUSED_KEYS: Mapping[str, str] = {
    "index_topk": "the sparse indexer keeps a second cache of keys beside each layer's",
    "index_n_heads": "the sparse indexer keeps a second cache of keys beside each layer's",
    "compress_ratios": "compressed attention keeps several caches a layer",
    "per_layer_config": "sizes that are given layer by layer there are not read",
    "use_cla": "layers that share K/V across the model are not derived from it",
    "cross_attention_layers": "cross-attention keeps a cache of the image's tokens",
    "add_cross_attention": "cross-attention keeps a cache of another model's tokens",
    "linear_attn_config": "the recurrent layers that it describes are not known",
    "attention_other_setting": "the other sizes that it gives to sliding layers are not read",
}


def geometry_from_config(
    mapping: Mapping[str, Any],
    block_size: int = 16,
    dtype: str | None = None,
    num_blocks: int = 1024,
    *,
    kv_packing: KVPacking = "packed",
    kernel_block_size: int | None = None,
    tp: int = 1,
    stages: Iterable[int] | None = None,
) -> CacheGeometry:
    """The KV cache of the decoder that a Hugging Face ``config.json`` describes.

    Layers are named as in vLLM, by their index N in the whole model:
    ``model.layers.N.self_attn.attn`` for attention of any kind, ``model.layers.N.linear_attn``,
    ``.mixer`` or ``.conv`` for recurrent state. Layers without a cache (MLP only, shared K/V,
    removed attention) are left out. Layers form one group per kind that occurs, in order of first
    occurrence: ``full``, ``sliding``, ``chunked``, with latents ``latent``, ``latent-sliding``,
    ``latent-chunked``, and ``state``.

    Args:
        mapping: the config; a composite model's decoder section is found.
        block_size: tokens of a block.
        dtype: the cache's dtype (see `dtype_from_config`). Recurrent state has the model's dtype:
            this one, unless it is of 8 bits, then the config's.
        num_blocks: blocks of each layer's cache on a rank.
        kv_packing: "packed" or "split" K/V; latents have no packing.
        kernel_block_size: tokens of the kernel's block; None means ``block_size``.
        tp: tensor parallel size, on which recurrent state's bytes depend and nothing else.
        stages: the model's layers per pipeline stage, those without a cache included.

    Raises:
        ConfigError: the cache cannot be derived; ``key`` is the key that is missing or wrong.
        GeometryError: a size that cannot be, stages that do not fit the model, or split K/V with
            heads of unequal sizes.
        OptionError: ``dtype`` is no dtype.
    """
    found = levels(mapping)
    keys = found[-1]
    _check_supported(found)
    if not is_whole(tp) or not 1 <= tp <= MAX_RANKS:
        raise GeometryError(f"tp is a whole number between 1 and {MAX_RANKS:,}, not {shown(tp)}")
    cache_dtype = dtypes.dtype_from_config(mapping, dtype)
    itemsize = ITEMSIZES[cache_dtype]
    kinds = without_removed(keys, layer_kinds(keys, layer_count(keys)))
    latent = latent_elements(keys)

    def latents(kind: str) -> tuple[str, LayerSpec]:
        group = "latent" if kind == "full" else f"latent-{kind}"
        return group, LatentSpec(
            block_size=block_size,
            row_bytes=(latent or 0) * itemsize,
            kernel_block_size=kernel_block_size,
        )

    def attention(kind: str, sizes: Sizes) -> tuple[str, LayerSpec]:
        return kind, AttentionSpec(
            block_size=block_size,
            total_kv_heads=sizes.kv_heads,
            head_size=sizes.head,
            v_head_size=sizes.v_head,
            itemsize=itemsize,
            kv_packing=kv_packing,
            kernel_block_size=kernel_block_size,
        )

    part, state = _state(found, kinds, tp, dtype)
    sizes = layer_sizes(keys, kinds) if latent is None else None
    layers: dict[str, LayerSpec] = {}
    groups: dict[str, list[str]] = {}
    group: str
    spec: LayerSpec | None
    for i, layer in enumerate(kinds):
        for kind in layer:
            if kind == "state":
                name, group, spec = f"model.layers.{i}.{part}", kind, state
            else:
                name = f"model.layers.{i}.self_attn.attn"
                group, spec = latents(kind) if sizes is None else attention(kind, sizes[i][kind])
            if spec is not None:
                layers[name] = spec
                groups.setdefault(group, []).append(name)
    if not layers:
        key = f"{keys.path}layer_types"
        raise ConfigError(f"by {key} (or its like) no layer of the model has a cache", key=key)
    return CacheGeometry(
        layers=layers,
        num_blocks=num_blocks,
        groups=tuple(LayerGroup(name=name, layer_names=names) for name, names in groups.items()),
        stages=None if stages is None else _cached_per_stage(stages, kinds),
    )


def _check_supported(found: list[Keys]) -> None:
    for keys in found:
        if keys.flag("is_encoder_decoder", False):
            raise keys.error(
                "is_encoder_decoder",
                "a decoder with cross-attention has a second cache, of the encoder's tokens, that "
                "no spec here describes; possible: decoder-only models",
            )
        why = _REFUSED_TYPES.get(keys.model_type)
        if why is not None:
            raise keys.error("model_type", f"it {why}; possible: decoder-only models")
    for key, why in _REFUSED_KEYS.items():
        if found[-1].get(key):
            raise found[-1].error(key, f"{why}; this model is not supported")


def _state(
    found: list[Keys], kinds: list[Kinds], tp: int, dtype: str | None
) -> tuple[str, StateSpec | None]:
    """The module and the spec of the recurrent layers; no spec where there are none."""
    keys = found[-1]
    if not any("state" in layer for layer in kinds):
        return "", None
    name = dtypes.asked(dtype)
    if name is None or ITEMSIZES[name] == 1:
        # An 8-bit cache dtype is about keys and values; state stays in the model's.
        name = dtypes.model_dtype(found)
    if name is None:
        key = f"{keys.path}dtype"
        raise ConfigError(
            f"{key} is missing: recurrent state has the model's dtype, which an 8-bit cache dtype "
            "does not say; give the config's dtype",
            key=key,
        )
    return states.family_of(keys).part, states.state_spec(keys, tp, name)


def _cached_per_stage(stages: Iterable[int], kinds: list[Kinds]) -> list[int]:
    """Layers per stage -> caches per stage: a layer may have none, or two."""
    counts = list(stages) if isinstance(stages, Iterable) else [stages]
    for count in counts:
        if not is_whole(count) or count < 1:
            raise GeometryError(f"a stage holds a whole number of layers >= 1, not {shown(count)}")
    if sum(counts) != len(kinds):
        raise GeometryError(
            f"the stages hold {shown(sum(counts))} layers; the model has {len(kinds)}"
        )
    cached: list[int] = []
    for count in counts:
        first = sum(counts[: len(cached)])
        cached.append(sum(len(layer) for layer in kinds[first : first + count]))
        if not cached[-1]:
            raise GeometryError(
                f"stage {len(cached) - 1} holds {count} layers from layer {first} on, none of "
                "which has a cache; move the stage's bounds"
            )
    return cached
