"""The direct strategy: whatever layout the engine has, kept as it is, one slice per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.hooks import hookimpl

if TYPE_CHECKING:
    from kvpolicy.caches import KVCaches
    from kvpolicy.context import PolicyContext
    from kvpolicy.decision import LayoutDecision
    from kvpolicy.registration import Registration


class Direct:
    """Registers layers when nobody else does and canonical is not requested."""

    priority = -100

    @hookimpl
    def register_layers(
        self, context: PolicyContext, decision: LayoutDecision, caches: KVCaches
    ) -> Registration | None:
        """Reads each layer's pages off its tensor, in whatever order the strides give."""
        del decision
        if context.canonical:
            return None
        from kvpolicy.registration import Registration

        return Registration.from_caches(context, caches)


policy = Direct()
