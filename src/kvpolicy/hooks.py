"""The three hooks. A plugin implements one or more and marks each with `hookimpl`.

A plugin is an object or a module, never a class, found under the entry-point group ``kvpolicy``.
Beside its hooks it may have ``priority: int`` (default 0; high is asked first), ``requires_api:
int`` and the functions that `FUNCTIONS` names.
A hook may take fewer arguments than it is offered. Wrappers, tryfirst and trylast are refused:
priorities are the one order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvpolicy.caches import KVCaches
    from kvpolicy.context import PolicyContext
    from kvpolicy.decision import LayoutDecision, Vote
    from kvpolicy.registration import Registration
    from kvpolicy.transfer import TransferHandle, TransferJob

PROJECT = "kvpolicy"
API_VERSION = 1
"""The version of the hooks. Whatever is added raises it by one; what a version offers stays.

What is to be replaced is marked with pluggy's ``warn_on_impl`` or ``warn_on_impl_args``, so that
its author is warned when the plugin is rehearsed, and keeps working.
"""

hookimpl = pluggy.HookimplMarker(PROJECT)
_hookspec = pluggy.HookspecMarker(PROJECT)


@_hookspec
def prefer_cross_layer_blocks(context: PolicyContext) -> bool | Vote | None:
    """Votes for cross-layer blocks (True), for per-layer registration (False), or abstains.

    When: once at start-up, in any process, before tensors exist; every plugin is asked.
    Owner: layout policies.

    Args:
        context: geometry, grid, rank, wishes and backend; sizes in bytes and tokens. Every rank
            must come to the same answer, so do not look at ``context.rank``.

    Returns:
        A bool, or ``Vote(answer, reason)``; the reason is shown to people.

    None means: no opinion, as does ``Vote(None, reason)``. False is an answer.

    Raises:
        Nothing. A plugin that raises, or returns something else, is out for this connector, with
        its reason listed; strict mode stops start-up.
    """


@_hookspec(firstresult=True)
def register_layers(
    context: PolicyContext, decision: LayoutDecision, caches: KVCaches
) -> Registration | None:
    """Says where each layer's pages lie in the engine's tensors.

    When: once, when the engine hands its tensors over; asked by priority until one answers.
    Owner: layout policies.

    Args:
        context: as for the vote.
        decision: what the votes came to.
        caches: this rank's tensors, dimension 0 counting (kernel) blocks, or a slab.

    Returns:
        A `Registration` of every layer of this rank: pages inside the engine's own storage, in
        bytes. ``Registration.from_caches(context, caches)`` reads them off the strides.

    None means: not mine; the next plugin is asked.

    Raises:
        RegistrationError: layers that contradict the context. Anything raised, and any
        registration that cannot be proved, stops start-up and names the plugin.
    """


@_hookspec(firstresult=True)
def transfer(job: TransferJob) -> TransferHandle | None:
    """Copies the blocks of a job.

    When: at every store and load, in the submitter's thread; asked by priority until one takes it.
    Owner: copy engines.

    Args:
        job: storages, rows and strided boxes in bytes, block ids and slots (already checked).

    Returns:
        A `TransferHandle`; return quickly and copy in the background. Its result names the
        destinations that were not wholly written.

    None means: not mine (another device, for instance); the next plugin is asked.

    Raises:
        Nothing. What is raised becomes a failed result that names the plugin.
    """


FUNCTIONS = ("status", "prepare_rows", "calibration")
"""What a plugin may offer beside its hooks; docs/reference/hooks.md has their signatures."""

HOOKS = ("prefer_cross_layer_blocks", "register_layers", "transfer")
