"""Written against the first version of the hooks, all three with all that they offer.

It is never changed: as long as it loads, votes, registers and copies, older plugins do.
"""

import time

import numpy as np
from numpy.lib.stride_tricks import as_strided

import kvpolicy


class FirstApi:
    priority = 170
    requires_api = 1

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        if context.options.get("acme_first_api") is None:
            return None
        heads = {spec.total_kv_heads for spec in context.geometry.layers.values()}
        if context.canonical and context.grid.tp <= min(heads):
            return kvpolicy.Vote(False, f"{len(context.geometry.layers)} layers lie apart")
        return kvpolicy.Vote(None, "another engine's")

    @kvpolicy.hookimpl
    def register_layers(self, context, decision, caches):
        if decision.decided_by != "first-api" or decision.cross_layer_blocks:
            return None
        pages = {}
        for name, spec in context.stage_layers.items():
            proof = kvpolicy.certify(spec, context.grid, decision.layout, context.order)
            if isinstance(proof, kvpolicy.Refusal):
                raise kvpolicy.RegistrationError("cannot be proved", {name: proof})
            size = proof.mapping(context.rank).local_page_bytes
            tensor = caches.tensors[name]
            pages[name] = kvpolicy.LayerPages(
                tensor=tensor,
                page=kvpolicy.StridedPage(
                    offset=tensor.storage_offset() * tensor.element_size(),
                    block_stride=size,
                    box=kvpolicy.Box(size),
                ),
            )
        return kvpolicy.Registration(pages=pages)

    @kvpolicy.hookimpl
    def transfer(self, job):
        if job.device != "cpu":
            return None
        begun, moved = time.perf_counter(), 0
        rows = job.rows.numpy()
        for part in job.parts:
            for span in part.spans():
                for copy in part.plan.copies:
                    box = copy.box
                    shape = (span.length, *(dim.times for dim in box.dims), box.size)
                    near = copy.offset + span.block * copy.block_stride + box.from_offset
                    cache = as_strided(
                        copy.storage.numpy()[near:],
                        shape,
                        (copy.block_stride, *(dim.from_stride for dim in box.dims), 1),
                    )
                    far = span.slot * rows.strides[0] + box.to_offset
                    row = as_strided(
                        rows.reshape(-1)[far:],
                        shape,
                        (rows.strides[0], *(dim.to_stride for dim in box.dims), 1),
                    )
                    if job.direction == "store":
                        np.copyto(row, cache)
                    else:
                        np.copyto(cache, row)
                moved += span.length * part.plan.block_bytes
        return kvpolicy.TransferHandle.finished(
            kvpolicy.TransferResult(
                job_id=job.job_id,
                ok=True,
                bytes=moved,
                seconds=time.perf_counter() - begun,
                failed_ids=(),
                error="",
            )
        )


policy = FirstApi()
