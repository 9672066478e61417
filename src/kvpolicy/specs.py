"""What one layer's cache holds: attention, latent or recurrent state. Sizes are bytes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import attrs

from kvpolicy.errors import GeometryError
from kvpolicy.values import int_between, seeing_self

MAX_BLOCK_TOKENS = 65_536
MAX_SIZE = 2**40

KVPacking = Literal["packed", "split"]


def _or(name: str) -> Any:
    """A converter: None becomes this instance's earlier field ``name``."""
    return seeing_self(lambda value, spec: getattr(spec, name) if value is None else value)


def _check_page(spec: AttentionSpec | LatentSpec, token_bytes: int) -> None:
    """Offsets are 64-bit numbers, and a page of such a size is a mistake."""
    if (page_bytes := token_bytes * spec.block_size) > MAX_SIZE:
        raise GeometryError(
            f"{type(spec).__name__} declares a page of {page_bytes:,} B ({spec.block_size} tokens "
            f"of {token_bytes:,} B); a page has at most {MAX_SIZE:,} B"
        )


_size = int_between(1, MAX_SIZE)
_extra = int_between(0, MAX_SIZE)
_tokens = int_between(1, MAX_BLOCK_TOKENS)


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """Keys and values of one attention layer, as the whole model has them.

    Attributes:
        block_size: tokens of a block.
        total_kv_heads: KV heads of the model's layer, before TP.
        head_size: elements of one key head.
        itemsize: bytes of one element.
        kv_packing: "packed" (K and V adjacent per (token, head)) or "split" (K half, V half).
        v_head_size: elements of one value head; None means ``head_size``.
        scale_bytes: bytes of an inline scale beside each K and each V row.
        page_padding: unused bytes at the end of every page in memory.
        kernel_block_size: tokens of the block that the attention kernel addresses; None means
            ``block_size``.

    Raises:
        GeometryError: a size that cannot be; split K/V with unequal sizes.
    """

    kind: ClassVar[str] = "attention"

    block_size: int = attrs.field(validator=_tokens)
    total_kv_heads: int = attrs.field(validator=int_between(1, 65_536))
    head_size: int = attrs.field(validator=_size)
    itemsize: int = attrs.field(validator=int_between(1, 64))
    kv_packing: KVPacking = attrs.field(default="packed")
    v_head_size: int = attrs.field(
        default=None,
        converter=_or("head_size"),  # type: ignore[misc] # see seeing_self
        validator=_size,
    )
    scale_bytes: int = attrs.field(default=0, validator=_extra)
    page_padding: int = attrs.field(default=0, validator=_extra)
    kernel_block_size: int = attrs.field(
        default=None,
        converter=_or("block_size"),  # type: ignore[misc] # see seeing_self
        validator=_tokens,
    )

    def __attrs_post_init__(self) -> None:
        if self.kv_packing not in ("packed", "split"):
            raise GeometryError(
                f"AttentionSpec.kv_packing is 'packed' or 'split', not {self.kv_packing!r}"
            )
        if self.split and self.v_head_size != self.head_size:
            raise GeometryError(
                f"split K/V has two equal halves, but head_size is {self.head_size} and "
                f"v_head_size {self.v_head_size}; declare kv_packing='packed'"
            )
        _check_page(self, self.halves * self.total_kv_heads * self.row_bytes)

    @property
    def split(self) -> bool:
        """Whether a page is a K half, then a V half."""
        return self.kv_packing == "split"

    @property
    def halves(self) -> int:
        """2 for split K/V, else 1."""
        return 2 if self.split else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one (token, head) row; of one half's row for split K/V."""
        if self.split:
            return self.head_size * self.itemsize + self.scale_bytes
        return (self.head_size + self.v_head_size) * self.itemsize + 2 * self.scale_bytes


@attrs.frozen(kw_only=True)
class LatentSpec:
    """A compressed latent (MLA): one row per token, the same on every TP rank.

    Attributes:
        block_size: tokens of a block.
        row_bytes: bytes of one token's row.
        page_padding: unused bytes at the end of every page in memory.
        kernel_block_size: as for `AttentionSpec`.

    Raises:
        GeometryError: a size that cannot be.
    """

    kind: ClassVar[str] = "latent"

    block_size: int = attrs.field(validator=_tokens)
    row_bytes: int = attrs.field(validator=_size)
    page_padding: int = attrs.field(default=0, validator=_extra)
    kernel_block_size: int = attrs.field(
        default=None,
        converter=_or("block_size"),  # type: ignore[misc] # see seeing_self
        validator=_tokens,
    )

    split: ClassVar[bool] = False
    halves: ClassVar[int] = 1
    total_kv_heads: ClassVar[int] = 1
    scale_bytes: ClassVar[int] = 0

    def __attrs_post_init__(self) -> None:
        _check_page(self, self.row_bytes)


@attrs.frozen(kw_only=True)
class StateSpec:
    """Recurrent state of one rank: opaque bytes, kept per rank, never portable.

    Attributes:
        state_bytes: bytes of one block's state on one rank.
        page_padding: unused bytes at the end of every page in memory.

    Raises:
        GeometryError: a size that cannot be.
    """

    kind: ClassVar[str] = "state"

    state_bytes: int = attrs.field(validator=_size)
    page_padding: int = attrs.field(default=0, validator=_extra)

    block_size: ClassVar[int] = 1
    kernel_block_size: ClassVar[int] = 1
    split: ClassVar[bool] = False
    halves: ClassVar[int] = 1
    scale_bytes: ClassVar[int] = 0


LayerSpec = AttentionSpec | LatentSpec | StateSpec
PagedSpec = AttentionSpec | LatentSpec
SPEC_TYPES = (AttentionSpec, LatentSpec, StateSpec)
