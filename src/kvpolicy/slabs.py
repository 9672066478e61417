"""Whether one slab could hold every layer's pages side by side, and if not, why."""

from __future__ import annotations

from kvpolicy.canonical import local_heads
from kvpolicy.context import PolicyContext
from kvpolicy.errors import Refusal
from kvpolicy.pages import page_shape
from kvpolicy.specs import LayerSpec, StateSpec


def slab_obstacle(context: PolicyContext) -> str | None:
    """What stands against a cross-layer slab, as a reason for people; None if nothing does.

    A slab holds one group of equal pages, without inline scales, in blocks that the kernel
    addresses whole, for a backend that is known to follow its strides. Whether canonical is
    requested plays no part, nor does the rank.
    """
    geometry, backend = context.geometry, context.backend
    specs = list(dict.fromkeys(geometry.layers.values()))
    if len(geometry.groups) > 1:
        names = ", ".join(group.name for group in geometry.groups)
        return f"the layers form {len(geometry.groups)} groups ({names}), each with its own blocks"
    if any(isinstance(spec, StateSpec) for spec in specs):
        return "recurrent state is not addressed through the attention backend's strides"
    if any(spec.scale_bytes for spec in specs):
        return "scales are inline in the rows, which a slab cell cannot be trusted to hold"
    sizes = {_padded_page_bytes(spec, context) for spec in specs}
    if len(sizes) > 1:
        return f"pages differ in size: {', '.join(f'{size} B' for size in sorted(sizes))}"
    split = [spec for spec in specs if spec.kernel_block_size != spec.block_size]
    if len(geometry.layers) > 1 and split:
        return (
            f"a kernel block of {split[0].kernel_block_size} tokens is smaller than the block of "
            f"{split[0].block_size}, and {len(geometry.layers)} layers would lie between"
        )
    if backend.stride_aware is None:
        return "whether the backend is stride-aware is not known, which counts as no"
    if not backend.stride_aware:
        return "the backend is not stride-aware"
    if backend.layouts is not None and context.layout.slab not in backend.layouts:
        return f"the backend does not take {context.layout.slab}"
    return None


def _padded_page_bytes(spec: LayerSpec, context: PolicyContext) -> int:
    heads = local_heads(spec, context.grid)
    # Heads that cannot be spread are refused later, with their reason.
    held = 1 if isinstance(heads, Refusal) else heads
    return page_shape(spec, held, spec.block_size, context.layout).page_bytes + spec.page_padding
