"""The built-in plugins keep their contracts, and so does one for caches that only it can read."""

from __future__ import annotations

import attrs
import torch
from hypothesis import settings

import kvpolicy as kv
from kvpolicy.policies.canonical import Canonical
from kvpolicy.policies.cross_layer import CrossLayer
from kvpolicy.policies.direct import Direct
from kvpolicy.policies.host_copy import HostCopy
from kvpolicy.testing import PolicyContract, TransferContract

EXAMPLES = max(1, settings.default.max_examples // 6)  # --hypothesis-profile=long tries many more


class TestCanonical(PolicyContract):
    examples = EXAMPLES

    def make_policy(self):
        return Canonical()

    def supports(self, context, decision):
        return context.canonical and not decision.cross_layer_blocks

    def expected_vote(self, context):
        return False if context.canonical else None


class TestCrossLayer(PolicyContract):
    examples = EXAMPLES

    def make_policy(self):
        return CrossLayer()

    def supports(self, context, decision):
        return not context.canonical and decision.cross_layer_blocks

    def expected_vote(self, context):
        """Yes needs much (its own tests say what); a backend that does not follow strides, no."""
        return ... if context.backend.stride_aware else None


class TestDirect(PolicyContract):
    examples = EXAMPLES
    votes = False

    def make_policy(self):
        return Direct()

    def supports(self, context, decision):
        return not context.canonical


class TestHostCopy(TransferContract):
    examples = EXAMPLES

    def make_transfer(self):
        return HostCopy()


class FlatBuffers:
    """The how-to guide's policy: every layer is one flat buffer of dense pages."""

    @kv.hookimpl
    def prefer_cross_layer_blocks(self, context):
        flat = context.options.get("acme_flat")
        return kv.Vote(False, "flat buffers") if flat else None

    @kv.hookimpl
    def register_layers(self, context, decision, caches):
        if not context.options.get("acme_flat") or decision.cross_layer_blocks:
            return None
        pages = {}
        for name, spec in context.stage_layers.items():
            tensor = caches.owner(name)
            proof = kv.certify(spec, context.grid, decision.layout, context.order)
            size = proof.mapping(context.rank).local_page_bytes
            start = tensor.storage_offset() * tensor.element_size()
            page = kv.StridedPage(offset=start, block_stride=size, box=kv.Box(size))
            pages[name] = kv.LayerPages(tensor=tensor, page=page)
        return kv.Registration(pages=pages)


class TestFlatBuffers(PolicyContract):
    examples = EXAMPLES

    def make_policy(self):
        return FlatBuffers()

    def supports(self, context, decision):
        return not decision.cross_layer_blocks

    def expected_vote(self, context):
        return False

    def adapt(self, context):
        layers = {}
        for name, spec in context.geometry.layers.items():
            whole = {} if spec.kind == "state" else {"kernel_block_size": spec.block_size}
            layers[name] = attrs.evolve(spec, page_padding=0, **whole)
        geometry = attrs.evolve(context.geometry, layers=layers)
        return attrs.evolve(context, geometry=geometry, options={"acme_flat": True})

    def ways(self, allocation):
        return attrs.evolve(allocation, layers="dense", typed=False)

    def present(self, context, decision, memory):
        if decision.cross_layer_blocks:
            return memory.caches
        flat = {
            name: torch.as_strided(view, (view.numel(),), (1,))
            for name, view in memory.views.items()
        }
        return kv.KVCaches(tensors=flat)
