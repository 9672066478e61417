"""The slab plugin keeps the policy contract of ``kvpolicy.testing``."""

from __future__ import annotations

import kvpolicy_slab

import kvpolicy
from kvpolicy.testing import PolicyContract


class TestSlab(PolicyContract):
    examples = 20

    def make_policy(self):
        return kvpolicy_slab.Slab()

    def supports(self, context, decision):
        return context.canonical and decision.cross_layer_blocks

    def expected_vote(self, context):
        if not context.canonical or kvpolicy.slab_obstacle(context) is not None:
            return None
        return ...  # True where every layer's page is certified in the slab
