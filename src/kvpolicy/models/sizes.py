"""KV heads and head sizes: of the model, of a kind of layer, of one layer."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvpolicy.models.kinds import NONE, Kinds
from kvpolicy.models.reading import Keys, shown
from kvpolicy.models.states import HIDDEN
from kvpolicy.values import is_whole

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups")
_PER_LAYER_KV = ("num_key_value_heads_per_layer", *KV_HEADS)  # DeciLM, OpenELM
HEAD_SIZE = ("head_dim", "kv_channels", "hidden_size_per_head")
MAX_HEADS = 65_536
_MAX_HEAD_SIZE = 2**20

_MULTI_QUERY = ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode")
# What a configuration class fills in where published configs leave the key out and hidden size
# over heads would be wrong: type -> (KV heads, head size).
_DEFAULTS: Mapping[str, tuple[int, int]] = {
    "gemma": (16, 256),
    "gemma2": (4, 256),
    "gemma3": (4, 256),
    "gemma3_text": (4, 256),
    "gemma3n": (2, 256),
    "gemma3n_text": (2, 256),
    "gemma4": (4, 256),
    "gemma4_text": (4, 256),
}


@attrs.frozen
class Sizes:
    """KV heads of a layer, and elements of one key and one value head."""

    kv_heads: int
    head: int
    v_head: int


def attention_heads(keys: Keys) -> int:
    """The model's query heads.

    Raises:
        ConfigError: missing or wrong.
    """
    return keys.need(HEADS, "the head count must be given", MAX_HEADS)


def _head_size(keys: Keys) -> int:
    found = keys.alias(HEAD_SIZE, _MAX_HEAD_SIZE)
    if found is None and keys.model_type in _DEFAULTS:
        return _DEFAULTS[keys.model_type][1]
    if found is not None:
        return found
    why = "without head_dim, the head size is hidden size over attention heads"
    hidden = keys.need(HIDDEN, why)
    heads = keys.need(HEADS, why, MAX_HEADS)
    if hidden % heads:
        name = next(name for name in HIDDEN if keys.get(name) is not None)
        raise keys.error(
            name, f"{heads} attention heads do not divide it; correct one of them, or give head_dim"
        )
    return hidden // heads


def _kv_heads(keys: Keys) -> int:
    """KV heads where one number holds for all layers: see the flags of each family."""
    new_falcon = keys.flag("new_decoder_architecture", False)
    if keys.flag("multi_query", keys.model_type in _MULTI_QUERY) and not new_falcon:
        return 1
    if keys.flag("multi_query_attention", False):  # ChatGLM
        return keys.need(
            ("multi_query_group_num",), "multi_query_attention is true and needs it", MAX_HEADS
        )
    attention = keys.section("attn_config")  # MPT, DBRX
    if attention is not None:
        found = attention.whole("kv_n_heads", MAX_HEADS)
        if found is not None:
            return found
        kind = attention.text("attn_type")
        if kind == "multiquery_attention":
            return 1
        if kind == "grouped_query_attention":
            raise attention.missing(("kv_n_heads",), "attn_type is grouped_query_attention")
    found = keys.alias(KV_HEADS, MAX_HEADS)
    if found is not None:
        return found
    if keys.model_type in _DEFAULTS:
        return _DEFAULTS[keys.model_type][0]
    return attention_heads(keys)


def _per_layer(keys: Keys, count: int) -> list[int | None] | None:
    for key in _PER_LAYER_KV:
        if not isinstance(keys.get(key), list | tuple):
            continue
        found = keys.items(key, count) or []
        for i, heads in enumerate(found):
            if not is_whole(heads) or not 1 <= heads <= MAX_HEADS:
                raise keys.error(
                    key, f"layer {i} has {shown(heads)} KV heads; possible: 1 to {MAX_HEADS:,}"
                )
        return found
    return None


def _blocks(keys: Keys, count: int) -> list[int | None] | None:
    """Nemotron-NAS: one object a layer; None for a layer whose attention was removed."""
    blocks = keys.items("block_configs", count)
    if blocks is None:
        return None
    found: list[int | None] = []
    for i, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise keys.error("block_configs", f"layer {i} has no object 'attention'")
        found.append(_block_heads(keys, Keys(attention, f"{keys.path}block_configs[{i}].")))
    return found


def _block_heads(keys: Keys, attention: Keys) -> int | None:
    if attention.flag("no_op", False) or attention.flag("replace_with_linear", False):
        return None
    for key in ("window_length", "is_mamba", "mamba", "llama4", "unshifted_sink"):
        if attention.get(key):
            raise attention.error(key, "a layer of this kind cannot be derived from block_configs")
    given = attention.whole("num_key_value_heads", MAX_HEADS)
    if given is not None:
        return given
    group = attention.need(("n_heads_in_group",), "KV heads are attention heads over it", MAX_HEADS)
    heads = attention_heads(keys)
    if heads % group:
        raise attention.error("n_heads_in_group", f"it does not divide {heads} attention heads")
    return heads // group


def without_removed(keys: Keys, kinds: list[Kinds]) -> list[Kinds]:
    """The kinds, less the layers whose attention ``block_configs`` removes."""
    blocks = _blocks(keys, len(kinds))
    if blocks is None:
        return kinds
    return [NONE if heads is None else kind for heads, kind in zip(blocks, kinds, strict=True)]


def layer_sizes(keys: Keys, kinds: list[Kinds]) -> list[Mapping[str, Sizes]]:
    """For each layer, its attention kinds -> sizes.

    Full-attention layers may differ from sliding ones: ``swa_*`` keys hold for the sliding (MiMo),
    ``global_head_dim`` and ``num_global_key_value_heads`` for the full (Gemma 4).

    Raises:
        ConfigError: a key that is missing or wrong.
    """
    occurring = {kind for layer in kinds for kind in layer} - {"state"}
    if not occurring:
        return [{} for _ in kinds]
    head = _head_size(keys)
    v_head = None if keys.get("use_mla") is False else keys.whole("v_head_dim", _MAX_HEAD_SIZE)
    own = _blocks(keys, len(kinds)) or _per_layer(keys, len(kinds))
    if own is not None:
        # None stands for a layer without attention, whose kinds are empty.
        each = [Sizes(heads or 1, head, v_head or head) for heads in own]
        return [dict.fromkeys(layer, sizes) for layer, sizes in zip(kinds, each, strict=True)]
    base = Sizes(_kv_heads(keys), head, v_head or head)
    by_kind = {kind: _special(keys, kind, base, v_head) for kind in sorted(occurring)}
    return [by_kind] * len(kinds)


def _special(keys: Keys, kind: str, base: Sizes, v_head: int | None) -> Sizes:
    if kind == "sliding":
        head = keys.whole("swa_head_dim", _MAX_HEAD_SIZE) or base.head
        value = keys.whole("swa_v_head_dim", _MAX_HEAD_SIZE) or v_head or head
        heads = keys.whole("swa_num_key_value_heads", MAX_HEADS) or base.kv_heads
        return Sizes(heads, head, value)
    if kind == "full" and keys.model_type in ("gemma4", "gemma4_text"):
        head = keys.need(
            ("global_head_dim",), "full-attention layers have heads of that size", _MAX_HEAD_SIZE
        )
        heads = base.kv_heads
        if keys.flag("attention_k_eq_v", False):
            heads = keys.whole("num_global_key_value_heads", MAX_HEADS) or heads
        return Sizes(heads, head, head)
    return base


def latent_elements(keys: Keys) -> int | None:
    """Elements of one token's latent row (MLA), None where the model has no latents.

    Raises:
        ConfigError: ``kv_lora_rank`` without ``qk_rope_head_dim``, or a value that cannot be.
    """
    if keys.get("use_mla") is False:
        return None
    rank = keys.whole("kv_lora_rank", _MAX_HEAD_SIZE)
    if rank is None:
        return None
    rope = keys.whole("qk_rope_head_dim", _MAX_HEAD_SIZE, least=0)
    if rope is None:
        raise keys.missing(
            ("qk_rope_head_dim",),
            "kv_lora_rank says that the cache holds latents, whose rows are "
            "kv_lora_rank + qk_rope_head_dim elements",
        )
    return rank + rope
