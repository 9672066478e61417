"""The cross-layer strategy: all layers of a block side by side, so that it moves in one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.decision import Vote
from kvpolicy.hooks import hookimpl
from kvpolicy.slabs import slab_obstacle

if TYPE_CHECKING:
    from kvpolicy.caches import KVCaches
    from kvpolicy.context import PolicyContext
    from kvpolicy.decision import LayoutDecision
    from kvpolicy.registration import Registration


class CrossLayer:
    """Votes for cross-layer blocks where one slab can hold every layer's pages."""

    priority = 50

    @hookimpl
    def prefer_cross_layer_blocks(self, context: PolicyContext) -> Vote:
        """True, or an abstention that says what stands against a slab."""
        against = slab_obstacle(context)
        if against is not None:
            return Vote(None, against)
        return Vote(True, "one group of equal pages and a stride-aware backend")

    @hookimpl
    def register_layers(
        self, context: PolicyContext, decision: LayoutDecision, caches: KVCaches
    ) -> Registration | None:
        """Reads each layer's pages off the slab."""
        if context.canonical or not decision.cross_layer_blocks:
            return None
        from kvpolicy.registration import Registration

        return Registration.from_caches(context, caches)


policy = CrossLayer()
