"""The canonical strategy: where stored bytes must be free of topology, the slab yields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.decision import Vote
from kvpolicy.hooks import hookimpl

if TYPE_CHECKING:
    from kvpolicy.caches import KVCaches
    from kvpolicy.context import PolicyContext
    from kvpolicy.decision import LayoutDecision
    from kvpolicy.registration import Registration


class Canonical:
    """Votes against cross-layer blocks when canonical is requested, and registers each layer."""

    priority = 100

    @hookimpl
    def prefer_cross_layer_blocks(self, context: PolicyContext) -> Vote:
        """False when canonical is requested, else no opinion."""
        if context.canonical:
            return Vote(
                False,
                "canonical is requested, and every layer's page is certified by itself; a "
                "cross-layer slab offers no per-layer reference",
            )
        return Vote(None, "canonical is not requested")

    @hookimpl
    def register_layers(
        self, context: PolicyContext, decision: LayoutDecision, caches: KVCaches
    ) -> Registration | None:
        """Reads each layer's pages off its own tensor."""
        if not context.canonical or decision.cross_layer_blocks:
            return None
        from kvpolicy.registration import Registration

        return Registration.from_caches(context, caches)


policy = Canonical()
