"""Two layout policies with strong opinions: one is for cross-layer blocks, one against them."""

from __future__ import annotations

import kvpolicy


class AcmeLayout:
    """Votes as it was told, over everybody's head, and registers what comes of it."""

    def __init__(self, answer: bool, priority: int, reason: str) -> None:
        self.answer, self.priority, self.reason = answer, priority, reason

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return kvpolicy.Vote(self.answer, self.reason)

    @kvpolicy.hookimpl
    def register_layers(self, context, decision, caches):
        if decision.cross_layer_blocks != self.answer:
            return None
        return kvpolicy.Registration.from_caches(context, caches)


slab = AcmeLayout(True, 300, "acme moves whole blocks")
layers = AcmeLayout(False, 60, "acme moves single layers")
