"""Names of cache dtypes, and the one that a config or the caller asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpolicy.dtypes import ITEMSIZES, SPELLINGS, plain_dtype
from kvpolicy.errors import ConfigError, OptionError
from kvpolicy.models.reading import Keys, levels, shown
from kvpolicy.words import close_names

_KEYS = ("dtype", "torch_dtype")


def _unknown(name: str) -> str:
    return f"no cache dtype of that name; {close_names(name.lower(), [*ITEMSIZES, *SPELLINGS])}"


def named(keys: Keys, key: str) -> str | None:
    """The plain dtype under ``key``; None when absent or "auto".

    Raises:
        ConfigError: not a string, or no dtype that a cache can have.
    """
    name = keys.text(key)
    if name is None or name.strip().lower() == "auto":
        return None
    found = plain_dtype(name)
    if found is None:
        raise keys.error(key, _unknown(name))
    return found


def model_dtype(found: list[Keys]) -> str | None:
    """The dtype that the config itself gives: the decoder's section first, then those outside.

    Raises:
        ConfigError: a value that is no dtype, or two spellings of the key that disagree.
    """
    for keys in reversed(found):
        names = {key: name for key in _KEYS if (name := named(keys, key)) is not None}
        if len(set(names.values())) > 1:
            raise keys.error(
                "dtype", f"but {keys.path}torch_dtype is {names['torch_dtype']!r}; drop one of them"
            )
        if names:
            return next(iter(names.values()))
    return None


def _check_not_quantised(found: list[Keys]) -> None:
    """Refuses a checkpoint that says its KV cache is quantised, in ways that engines differ on."""
    for keys in reversed(found):
        for section in ("quantization_config", "compression_config"):
            quantised = keys.section(section)
            for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
                if quantised is not None and quantised.get(key) is not None:
                    raise quantised.error(
                        key,
                        "so the cache is quantised; pass the cache's own type, as in --dtype fp8",
                    )


def asked(dtype: str | None) -> str | None:
    """The plain name of the caller's dtype; None when there is none or it is "auto".

    Raises:
        OptionError: no such dtype; the text has close names.
    """
    if dtype is None:
        return None
    if not isinstance(dtype, str):
        raise OptionError(f"a dtype is given by name, not as {type(dtype).__name__}")
    if dtype.strip().lower() == "auto":
        return None
    found = plain_dtype(dtype)
    if found is None:
        raise OptionError(f"dtype {shown(dtype)}: {_unknown(dtype)}")
    return found


def dtype_from_config(mapping: Mapping[str, Any], dtype: str | None = None) -> str:
    """The cache dtype's plain name, such as "bfloat16" or "float8_e4m3fn".

    Args:
        mapping: a Hugging Face config.json.
        dtype: what the caller wants, in any usual spelling ("fp8", "torch.float16"); it wins over
            the config. None and "auto" leave it to the config's ``dtype`` or ``torch_dtype``.

    Raises:
        ConfigError: the config gives no dtype, "auto", or one that no cache can have; or its
            ``quantization_config`` says that the cache is quantised.
        OptionError: ``dtype`` is no dtype.
    """
    found = levels(mapping)
    name = asked(dtype)
    if name is None:
        _check_not_quantised(found)
        name = model_dtype(found)
    if name is None:
        key = f"{found[-1].path}dtype"
        raise ConfigError(
            f"{key} is missing or 'auto' (also spelled torch_dtype): the config does not say how "
            "wide an element is; pass --dtype, for instance --dtype bfloat16",
            key=key,
        )
    return name
