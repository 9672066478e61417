"""Canonical pages inside a cross-layer slab: blocks that move together, bytes free of topology.

A page inside a slab is a strided box like any other: its layer's offset, the slab's block stride,
and the same box from the dense page to the canonical one. So where every rank's page can be
certified in the slab's order, nobody has to choose between the two wishes.
"""

from __future__ import annotations

import kvpolicy


class Slab:
    """Votes for a slab when canonical is requested, and registers each layer inside it."""

    priority = 150  # before canonical (100), which keeps layers apart
    requires_api = 1

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context: kvpolicy.PolicyContext) -> kvpolicy.Vote:
        """True where the pages inside a slab can be certified, else no opinion, with the reason."""
        if not context.canonical:
            return kvpolicy.Vote(None, "canonical is not requested")
        against = kvpolicy.slab_obstacle(context)
        if against is not None:
            return kvpolicy.Vote(None, against)
        layout = context.layout.slab
        for spec in dict.fromkeys(context.geometry.layers.values()):
            proof = kvpolicy.certify(spec, context.grid, layout, context.order)
            if isinstance(proof, kvpolicy.Refusal):
                return kvpolicy.Vote(None, f"pages cannot be certified in {layout}: {proof}")
        return kvpolicy.Vote(True, f"every page is certified at its own place in a {layout} slab")

    @kvpolicy.hookimpl
    def register_layers(
        self,
        context: kvpolicy.PolicyContext,
        decision: kvpolicy.LayoutDecision,
        caches: kvpolicy.KVCaches,
    ) -> kvpolicy.Registration | None:
        """Reads each layer's pages at its offset and strides in the slab.

        In BLHNC and BLNHC a page is one run; in BHLNC its heads lie apart, which makes more runs
        of the same bytes.
        """
        if not (context.canonical and decision.cross_layer_blocks):
            return None
        return kvpolicy.Registration.from_caches(context, caches)


policy = Slab()
