"""The six physical orders of a paged KV cache over the axes [L, B, H, N, C].

L layers, B blocks, H heads, N tokens of a block, C the opaque content of one (token, head).
The names and the aliases HND and NHD are vLLM's (its RFC 42082).
"""

from __future__ import annotations

import enum

from kvpolicy.errors import LayoutError
from kvpolicy.words import close_names

_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}


class KVCacheLayout(enum.Enum):
    """One physical order, outermost axis first.

    ``KVCacheLayout.parse("hnd") is KVCacheLayout.LBHNC``: aliases are normalised at the
    boundary, so that members can be compared with ``is``.
    """

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @classmethod
    def parse(cls, name: str | KVCacheLayout) -> KVCacheLayout:
        """The layout of that name, in any case; HND and NHD are LBHNC and LBNHC.

        Raises:
            LayoutError: no such layout; the text has close names.
        """
        if isinstance(name, cls):
            return name
        if not isinstance(name, str):
            raise LayoutError(f"a layout is given by name, not as {type(name).__name__} {name!r}")
        key = name.strip().upper()
        key = _ALIASES.get(key, key)
        if key not in cls.__members__:
            known = [*cls.__members__, *_ALIASES]
            raise LayoutError(f"no KV cache layout {name!r}; {close_names(name.upper(), known)}")
        return cls[key]

    @property
    def heads_first(self) -> bool:
        """Whether the head axis lies outside the token axis (the HND order)."""
        return self.value.index("H") < self.value.index("N")

    @property
    def layer_compact(self) -> bool:
        """L outermost: each layer has memory of its own."""
        return self.value.startswith("L")

    @property
    def block_outermost(self) -> bool:
        """B outermost: cross-layer blocks, in the older vocabulary."""
        return self.value.startswith("B")

    @property
    def block_compact(self) -> bool:
        """L and B are the two outer axes, so that a page is one run of bytes."""
        return set(self.value[:2]) == {"L", "B"}

    @property
    def block_contiguous(self) -> bool:
        """The tail is exactly H, N, C."""
        return self.value.endswith("HNC")

    @property
    def order(self) -> KVCacheLayout:
        """The per-layer layout of the same head/token order: LBHNC or LBNHC."""
        return KVCacheLayout.LBHNC if self.heads_first else KVCacheLayout.LBNHC

    @property
    def slab(self) -> KVCacheLayout:
        """The cross-layer layout of the same head/token order: BLHNC or BLNHC."""
        return KVCacheLayout.BLHNC if self.heads_first else KVCacheLayout.BLNHC

    def __str__(self) -> str:
        """The name."""
        return self.value
