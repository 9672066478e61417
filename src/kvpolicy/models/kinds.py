"""Which kind of cache each layer has: the many ways in which configs say so.

A layer's kinds are a tuple: usually one, two where attention and a recurrent mixer share a layer
(Falcon-H1), none where the layer has no cache of its own (MLP-only layers, shared K/V).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvpolicy.geometry import MAX_LAYERS
from kvpolicy.models.reading import Keys, shown
from kvpolicy.models.states import FAMILIES
from kvpolicy.values import is_whole
from kvpolicy.words import close_names

Kinds = tuple[str, ...]

FULL: Kinds = ("full",)
SLIDING: Kinds = ("sliding",)
CHUNKED: Kinds = ("chunked",)
STATE: Kinds = ("state",)
NONE: Kinds = ()

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "num_transformer_layers",
)
_BY_NAME: Mapping[str, Kinds] = {
    "full_attention": FULL,
    "attention": FULL,
    "global": FULL,
    "sliding_attention": SLIDING,
    "sliding": SLIDING,
    "local": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": STATE,
    "mamba": STATE,
    "conv": STATE,
    "moe": NONE,
    "mlp": NONE,
}
# Lists (or a string) with one item a layer: key -> item -> kinds. The first that is there decides.
_PER_LAYER: Mapping[str, Mapping[Any, Kinds]] = {
    "layer_types": _BY_NAME,
    "layers_block_type": _BY_NAME,
    "hybrid_override_pattern": {"M": STATE, "*": FULL, "-": NONE, "E": NONE},  # NemotronH
    "hybrid_layer_pattern": {0: FULL, 1: SLIDING},  # MiMo-V2
    "attn_type_list": {1: FULL, 0: STATE},  # MiniMax
    "attention_layers": _BY_NAME,  # GPT-Neo
}
# Lists of the full-attention layers; the others are recurrent (Bamba, LFM2).
_FULL_LAYERS = ("attn_layer_indices", "full_attn_idxs")
_EVERY = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
# Every n-th layer is full where neither layer_types nor a pattern says so: the configuration
# classes' own defaults.
_DEFAULT_EVERY: Mapping[str, int] = {
    "gemma2": 2,
    "vaultgemma": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "olmo3": 4,
    "gemma3n": 5,
    "gemma3n_text": 5,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma4": 6,
    "gemma4_text": 6,
}
# Families that mix kinds by rules of their own: without a list, one window would be a guess.
_NEEDS_LIST: Mapping[str, str] = {
    "mimo_v2": "hybrid_layer_pattern",
    "mimo_v2_flash": "hybrid_layer_pattern",
    "cohere2_moe": "layer_types",
    "granite_swa": "layer_types",
    "granitemoe_swa": "layer_types",
    "qwen2_moe": "layer_types",
    "smollm3": "layer_types",
}
_LLAMA4 = ("llama4", "llama4_text")


def layer_count(keys: Keys) -> int:
    """The decoder's layers, those without a cache included.

    Raises:
        ConfigError: missing, not a whole number in [1, 4096], or spelled twice differently.
    """
    count = keys.alias(LAYERS, MAX_LAYERS)
    if count is not None:
        return count
    for key in _PER_LAYER:
        value = keys.get(key)
        if isinstance(value, list | tuple | str):
            if 1 <= len(value) <= MAX_LAYERS:
                return len(value)
            raise keys.error(key, f"a model has 1 to {MAX_LAYERS:,} layers, not {len(value):,}")
    raise keys.missing(LAYERS, "how many layers the model has must be given")


def layer_kinds(keys: Keys, count: int) -> list[Kinds]:
    """The kinds of each of ``count`` layers.

    Raises:
        ConfigError: a list of another length, an unknown kind, or a key that is missing or wrong.
    """
    found = next((kinds for way in _WAYS if (kinds := way(keys, count)) is not None), None)
    if found is None:
        found = _windows(keys, count)
    if keys.model_type in ("gemma4", "gemma4_text"):
        found = [*found[:-1], FULL]  # its configuration class forces the last layer
    return _without_shared(keys, found)


def _without_shared(keys: Keys, found: list[Kinds]) -> list[Kinds]:
    if keys.model_type in ("gemma3n", "gemma3n_text") and keys.get("num_kv_shared_layers") is None:
        raise keys.missing(
            ("num_kv_shared_layers",), "the last so many layers have no cache of their own"
        )
    shared = keys.whole("num_kv_shared_layers", least=0) or 0
    if shared >= len(found):
        raise keys.error("num_kv_shared_layers", f"it must be less than the {len(found):,} layers")
    return [*found[: len(found) - shared], *[NONE] * shared]


def _listed(keys: Keys, count: int) -> list[Kinds] | None:
    for key, kinds in _PER_LAYER.items():
        if keys.get(key) is None:
            continue
        value = keys.get(key)
        if isinstance(value, str) and key == "hybrid_override_pattern":
            value = list(value)
            if len(value) != count:
                raise keys.error(key, f"it has {len(value):,} letters for {count:,} layers")
        else:
            value = keys.items(key, count)
        return [_kind(keys, key, i, item, kinds) for i, item in enumerate(value or ())]
    return None


def _kind(keys: Keys, key: str, i: int, item: object, kinds: Mapping[Any, Kinds]) -> Kinds:
    plain = isinstance(item, str | int) and not isinstance(item, bool)
    if not plain or item not in kinds:
        known = [str(name) for name in kinds]
        near = close_names(item, known) if isinstance(item, str) else f"known: {', '.join(known)}"
        raise keys.error(key, f"layer {i} is of the unknown kind {shown(item)}; {near}")
    return kinds[item]


def _neo(keys: Keys, count: int) -> list[Kinds] | None:
    """GPT-Neo's compact form: [[["global", "local"], 12]] is that pair twelve times."""
    found: list[Kinds] = []
    key = "attention_types"
    parts = keys.items(key)
    if parts is None:
        return None
    for part in parts:
        if not (isinstance(part, list) and len(part) == 2 and isinstance(part[0], list)):
            raise keys.error(key, "each item must be [[kinds], times]")
        times = part[1]
        if not is_whole(times) or not 0 <= times <= MAX_LAYERS:
            raise keys.error(key, f"{shown(times)} is not a number of times")
        if times * len(part[0]) > count:
            raise keys.error(key, f"it covers more than the model's {count:,} layers")
        found += [_kind(keys, key, i, kind, _BY_NAME) for i, kind in enumerate(part[0])] * times
    if len(found) != count:
        raise keys.error(key, f"it covers {len(found):,} layers; the model has {count:,}")
    return found


def _indexed(keys: Keys, count: int) -> list[Kinds] | None:
    for key in _FULL_LAYERS:
        full = keys.items(key)
        if full is None:
            continue
        for i in full:
            if not is_whole(i) or not 0 <= i < count:
                raise keys.error(key, f"{shown(i)} is not one of the {count:,} layers")
        return [FULL if i in set(full) else STATE for i in range(count)]
    return None


def _periodic(keys: Keys, count: int) -> list[Kinds] | None:
    """Jamba's period and offset; Qwen3-Next's interval."""
    period = keys.whole("attn_layer_period", MAX_LAYERS)
    if period is not None:
        offset = keys.whole("attn_layer_offset", MAX_LAYERS, least=0)
        if offset is None:
            raise keys.missing(("attn_layer_offset",), "attn_layer_period needs it")
        if offset >= period:
            raise keys.error("attn_layer_offset", f"it must be less than the period, {period}")
        return [FULL if i % period == offset else STATE for i in range(count)]
    interval = keys.whole("full_attention_interval", MAX_LAYERS)
    return (interval and [STATE if (i + 1) % interval else FULL for i in range(count)]) or None


def _recurrent(keys: Keys, count: int) -> list[Kinds] | None:
    if keys.model_type == "falcon_h1":
        return [("full", "state")] * count
    family = FAMILIES.get(keys.model_type)
    if family is not None and family.layers:
        raise keys.missing(family.layers, "it says which layers are recurrent")
    return None if family is None else [STATE] * count


def _chunks(keys: Keys, count: int) -> list[Kinds] | None:
    """Llama 4: layers with rotary positions attend within chunks; its 1s mean rotary."""
    key = "attention_chunk_size"
    if keys.model_type.startswith("mimo_v2"):
        return None  # their configs carry the key, their models have no chunks
    if keys.whole(key) is None:
        return [FULL] * count if keys.model_type in _LLAMA4 else None
    if keys.model_type not in _LLAMA4:
        raise keys.error(key, "which layers attend in chunks is not said; give layer_types")
    rotary = keys.items("no_rope_layers")
    if rotary:
        keys.items("no_rope_layers", count)
    else:
        # An empty list means the class's own rule: every fourth layer attends to everything.
        every = keys.whole("no_rope_layer_interval", MAX_LAYERS) or 4
        rotary = [int((i + 1) % every != 0) for i in range(count)]
    flags = {0: FULL, 1: CHUNKED}
    return [_kind(keys, "no_rope_layers", i, item, flags) for i, item in enumerate(rotary)]


_WAYS: tuple[Callable[[Keys, int], list[Kinds] | None], ...] = (
    _listed,
    _neo,
    _indexed,
    _periodic,
    _recurrent,
    _chunks,
)


def _windows(keys: Keys, count: int) -> list[Kinds]:
    """A sliding window in all layers, in all but every n-th, or from some layer on."""
    model = keys.model_type
    key = "sliding_window"
    window = keys.whole(key, least=0) or keys.whole("sliding_window_size", least=0)
    # Null switches the window off; left out, it has the size that the family gives it.
    implied = key not in keys.values and (
        model in _DEFAULT_EVERY or any(keys.get(name) is not None for name in _EVERY)
    )
    if not keys.flag("use_sliding_window", not model.startswith("qwen")):
        return [FULL] * count
    if not window and not implied:
        return [FULL] * count
    if model in _NEEDS_LIST:
        name = _NEEDS_LIST[model]
        raise keys.missing((name, "layer_types"), "it says which layers have the sliding window")
    letters = keys.get(_EVERY[0])
    if isinstance(letters, str):  # EXAONE 4: "LLLG" repeats
        if not letters:
            raise keys.error(_EVERY[0], "it needs at least one letter")
        pattern = [
            _kind(keys, _EVERY[0], i, letter, {"L": SLIDING, "G": FULL})
            for i, letter in enumerate(letters)
        ]
        return [pattern[i % len(pattern)] for i in range(count)]
    every = keys.alias(_EVERY, MAX_LAYERS) or _DEFAULT_EVERY.get(model)
    if every is not None:
        return [SLIDING if (i + 1) % every else FULL for i in range(count)]
    first = keys.whole("max_window_layers", least=0)
    if first is None and model in ("qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl"):
        raise keys.missing(("max_window_layers",), "the window begins at that layer")
    return [FULL if i < (first or 0) else SLIDING for i in range(count)]
