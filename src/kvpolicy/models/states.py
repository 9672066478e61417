"""Recurrent state: the bytes that one rank keeps for a layer, by family.

The shapes are those of vLLM's ``MambaStateShapeCalculator`` (model_executor/layers/mamba/
mamba_utils.py) without speculative tokens, as each family's model calls it. A state is a
convolution's window in the model's dtype and, but for short convolutions, a temporal state in the
SSM dtype. Elements of one rank at ``tp``, with K the convolution's kernel size:

=========  ====================================================  ============================
formula    convolution                                           temporal state
=========  ====================================================  ============================
mamba1     inner/tp * (K-1)                                      inner/tp * state
mamba2     (inner + 2*groups*state)/tp * (K-1)                   heads/tp * head_dim * state
gated      (2*k_heads*k_dim + v_heads*v_dim)/tp * (K-1)          v_heads/tp * v_dim * k_dim
conv       channels/tp * (K-1)                                   none
=========  ====================================================  ============================

In mamba2 a single group is repeated on every rank (groups = tp); several must divide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from kvpolicy.dtypes import ITEMSIZES
from kvpolicy.errors import ConfigError
from kvpolicy.models.dtypes import named
from kvpolicy.models.reading import Keys
from kvpolicy.specs import StateSpec

HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "model_dim")
_WHY = "the size of the recurrent state follows from it"
_SMALL = 2**20
_SSM_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")

Elements = tuple[int, int]


def _need(keys: Keys, *names: str) -> int:
    return keys.need(names, _WHY, _SMALL)


def _share(keys: Keys, name: str, count: int, tp: int) -> int:
    if count % tp:
        fit = [str(n) for n in range(1, min(count, 4096) + 1) if count % n == 0]
        raise keys.error(
            name,
            f"{count:,} cannot be split evenly over tp {tp}, so a rank's recurrent state has no "
            f"size; possible tp: {', '.join(fit[-8:])}",
        )
    return count // tp


def _window(keys: Keys, *names: str) -> int:
    """Tokens that a convolution remembers: its kernel, less the token at hand."""
    kernel = _need(keys, *names)
    if kernel < 2:
        name = next(name for name in names if keys.get(name) is not None)
        raise keys.error(name, "a convolution of one token has no state; it must be 2 or more")
    return kernel - 1


def _expanded(keys: Keys, expand: str, explicit: str = "") -> int:
    """The mixer's width: what ``explicit`` says where there is such a key, else by expansion."""
    width = keys.whole(explicit, _SMALL) if explicit else None
    return width or _need(keys, expand) * _need(keys, *HIDDEN)


def _mamba2(
    keys: Keys,
    tp: int,
    inner: int | None,
    heads: Sequence[str],
    head_dim: str,
    groups: Sequence[str],
    state: str,
    kernel: Sequence[str],
) -> Elements:
    count = _need(keys, *heads)
    if inner is not None and keys.get(head_dim) in (None, "auto"):
        if inner % count:
            raise keys.error(heads[0], f"it must divide the mixer's width, {inner:,}")
        dim = inner // count
    else:
        dim = _need(keys, head_dim)
        if inner is not None and dim * count != inner:
            raise keys.error(
                head_dim, f"{count} heads of it are not the mixer's width, {inner:,}; correct one"
            )
    share = _share(keys, heads[0], count, tp)
    sets = _need(keys, *groups)
    # One group is repeated on every rank; several go with their heads.
    sets = 1 if sets == 1 else _share(keys, groups[0], sets, tp)
    size = _need(keys, state)
    return (share * dim + 2 * sets * size) * _window(keys, *kernel), share * dim * size


def _mamba(keys: Keys, tp: int) -> Elements:
    # falcon-mamba-7b gives a width that is not its expansion; the width is what the weights have.
    width = _expanded(keys, "expand", "intermediate_size")
    share = _share(keys, "intermediate_size", width, tp)
    return share * _window(keys, "conv_kernel"), share * _need(keys, "state_size")


def _jamba(keys: Keys, tp: int) -> Elements:
    share = _share(keys, "mamba_expand", _expanded(keys, "mamba_expand"), tp)
    return share * _window(keys, "mamba_d_conv"), share * _need(keys, "mamba_d_state")


def _plain_mamba2(keys: Keys, tp: int) -> Elements:
    return _mamba2(
        keys,
        tp,
        _expanded(keys, "expand"),
        ("num_heads",),
        "head_dim",
        ("n_groups",),
        "state_size",
        ("conv_kernel",),
    )


def _bamba(keys: Keys, tp: int) -> Elements:
    return _mamba2(
        keys,
        tp,
        _expanded(keys, "mamba_expand", "mamba_d_ssm"),
        ("mamba_n_heads",),
        "mamba_d_head",
        ("mamba_n_groups",),
        "mamba_d_state",
        ("mamba_d_conv",),
    )


def _nemotron_h(keys: Keys, tp: int) -> Elements:
    # The width is heads * head size here, whatever expand says.
    return _mamba2(
        keys,
        tp,
        None,
        ("mamba_num_heads",),
        "mamba_head_dim",
        ("n_groups", "mamba_n_groups"),
        "ssm_state_size",
        ("conv_kernel", "mamba_d_conv"),
    )


def _gated_delta(keys: Keys, tp: int) -> Elements:
    k_heads, v_heads = (
        _share(keys, name, _need(keys, name), tp)
        for name in ("linear_num_key_heads", "linear_num_value_heads")
    )
    k_dim, v_dim = _need(keys, "linear_key_head_dim"), _need(keys, "linear_value_head_dim")
    window = _window(keys, "linear_conv_kernel_dim")
    return (2 * k_heads * k_dim + v_heads * v_dim) * window, v_heads * v_dim * k_dim


def _short_conv(keys: Keys, tp: int) -> Elements:
    name = "conv_dim" if keys.get("conv_dim") is not None else "hidden_size"
    return _share(keys, name, _need(keys, name), tp) * _window(keys, "conv_L_cache"), 0


@attrs.frozen
class Family:
    """How a model type keeps recurrent state.

    Attributes:
        part: the module in a layer that owns the state, as vLLM names it.
        elements: (config, tp) -> elements of one rank's convolution and temporal state.
        layers: the keys that say which layers are recurrent; none where all are.
    """

    part: str
    elements: Callable[[Keys, int], Elements]
    layers: tuple[str, ...] = ()


_GATED = Family("linear_attn", _gated_delta, ("layer_types", "full_attention_interval"))
_CONV = Family("conv", _short_conv, ("layer_types", "full_attn_idxs"))

FAMILIES: Mapping[str, Family] = {
    "mamba": Family("mixer", _mamba),
    "falcon_mamba": Family("mixer", _mamba),
    "mamba2": Family("mixer", _plain_mamba2),
    "jamba": Family("mixer", _jamba, ("attn_layer_period", "layer_types")),
    "bamba": Family("mixer", _bamba, ("attn_layer_indices", "layer_types")),
    "granitemoehybrid": Family("mixer", _bamba, ("layer_types", "layers_block_type")),
    "falcon_h1": Family("mixer", _bamba),
    "nemotron_h": Family("mixer", _nemotron_h, ("hybrid_override_pattern", "layers_block_type")),
    "qwen3_next": _GATED,
    "qwen3_5": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_5_moe": _GATED,
    "qwen3_5_moe_text": _GATED,
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
}
"""model_type -> its recurrent layers."""


def family_of(keys: Keys) -> Family:
    """The family of a config that has recurrent layers.

    Raises:
        ConfigError: a ``model_type`` whose state's size is not known here.
    """
    family = FAMILIES.get(keys.model_type)
    if family is None:
        key = f"{keys.path}model_type"
        raise ConfigError(
            f"{key} is {keys.model_type!r}, which has recurrent layers of a kind whose state "
            f"cannot be sized from the config; known: {', '.join(FAMILIES)}",
            key=key,
        )
    return family


def state_spec(keys: Keys, tp: int, dtype: str) -> StateSpec:
    """One rank's recurrent state in every recurrent layer of the model.

    Args:
        keys: the decoder's section.
        tp: tensor parallel size; the state of one rank depends on it.
        dtype: the model's dtype, which a convolution's window has. The temporal state has that of
            ``mamba_ssm_dtype`` or ``mamba_ssm_cache_dtype`` where the config gives one.

    Raises:
        ConfigError: a key that is missing or wrong, or a count that tp does not divide.
        GeometryError: sizes so large that no rank could hold the state.
    """
    convolution, temporal = family_of(keys).elements(keys, tp)
    ssm_dtype = next((name for key in _SSM_DTYPES if (name := named(keys, key))), None)
    if ssm_dtype is None:
        # The one family whose engine and configuration class widen it by default.
        ssm_dtype = "float32" if keys.model_type == "nemotron_h" else dtype
    return StateSpec(state_bytes=convolution * ITEMSIZES[dtype] + temporal * ITEMSIZES[ssm_dtype])
