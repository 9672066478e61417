"""Start-up: votes become a decision, the decision is certified, a policy registers the layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from kvpolicy import identity
from kvpolicy.boxes import compose, normal
from kvpolicy.caches import KVCaches
from kvpolicy.certify import Certificate
from kvpolicy.context import PolicyContext
from kvpolicy.decision import CastVote, LayoutDecision, Vote, decide
from kvpolicy.errors import (
    CertificationError,
    OptionError,
    PolicyConflictError,
    Refusal,
    RegistrationError,
)
from kvpolicy.explain import explain, explain_conflict
from kvpolicy.identity import GroupFormat
from kvpolicy.plugins import Plugin, PluginSet
from kvpolicy.records import (
    Fragments,
    GroupRecord,
    Proofs,
    fragments,
    group_records,
    prove_layers,
)
from kvpolicy.registration import Registration, check_caches, verify
from kvpolicy.words import shown, spare, told

if TYPE_CHECKING:
    import torch

_Refused = TypeVar("_Refused", CertificationError, RegistrationError)


@attrs.frozen(kw_only=True, eq=False)
class StartUp:
    """What is settled before any tensor exists; the same on every rank.

    Attributes:
        context: what the engine asked for.
        plugins: who took part; plugins whose vote was faulty are out.
        decision: what the votes came to.
        proofs: layer name -> its certificate.
        records, formats, counts: by group name; empty where a layer is refused.
    """

    context: PolicyContext
    plugins: PluginSet
    decision: LayoutDecision
    proofs: Proofs = attrs.field(repr=False)
    records: Mapping[str, GroupRecord] = attrs.field(repr=False)
    formats: Mapping[str, GroupFormat] = attrs.field(repr=False)
    counts: Mapping[str, Fragments] = attrs.field(repr=False)

    @property
    def record_bytes(self) -> int:
        """Bytes of the largest group's record."""
        return max(record.record_bytes for record in self.records.values())

    @property
    def format_id(self) -> str:
        """The digest over the groups' formats."""
        return identity.format_id(self.formats)

    @property
    def fingerprint(self) -> str:
        """What every rank of one engine must agree on."""
        active = [plugin.info for plugin in self.plugins.active]
        return identity.fingerprint(
            self.context,
            self.decision,
            self.formats,
            [(i.name, i.distribution, i.version, i.priority) for i in active],
        )

    def explain(self, refusals: Mapping[str, Refusal] | None = None) -> dict[str, Any]:
        """The explanation, with the layers that were refused since."""
        return explain(
            self.context,
            self.decision,
            self.proofs,
            self.plugins,
            records=self.records,
            counts=self.counts,
            formats=self.formats,
            format_id=self.format_id if self.records else None,
            fingerprint=self.fingerprint if self.records else None,
            refusals=refusals or {},
        )

    def refused(self, error: _Refused) -> _Refused:
        """The error, with the explanation that goes with it."""
        error.explanation = self.explain(error.refusals)
        return error


def start_up(context: PolicyContext, plugins: PluginSet) -> StartUp:
    """Votes, decides and certifies.

    Raises:
        PolicyConflictError: opposite votes at the deciding priority.
        PluginError: strict, and a plugin's vote is faulty.
        CertificationError: some layer cannot be certified; one reason for each.
    """
    votes, plugins = _votes(context, plugins)
    try:
        decision = decide(votes, context.layout)
    except PolicyConflictError as error:
        error.explanation = explain_conflict(votes, plugins)
        raise
    proofs = prove_layers(context, decision)
    certificates = {n: p for n, p in proofs.items() if isinstance(p, Certificate)}
    refusals = {n: p for n, p in proofs.items() if isinstance(p, Refusal)}
    records = {} if refusals else group_records(context, certificates)
    started = StartUp(
        context=context,
        plugins=plugins,
        decision=decision,
        proofs=proofs,
        records=records,
        formats=MappingProxyType(
            {n: identity.group_format(context, decision, r) for n, r in records.items()}
        ),
        counts={n: fragments(context, decision, certificates, r) for n, r in records.items()},
    )
    if refusals:
        grid = context.grid
        message = (
            f"{len(refusals)} of {len(proofs)} layers cannot be certified for {decision.layout} at "
            f"tp {grid.tp}, dcp {grid.dcp}, pcp {grid.pcp}"
        )
        raise started.refused(CertificationError(message, refusals))
    return started


def _votes(context: PolicyContext, plugins: PluginSet) -> tuple[list[CastVote], PluginSet]:
    votes = []
    for plugin in list(plugins.having("prefer_cross_layer_blocks")):
        info = plugin.info
        try:
            said = plugin.call("prefer_cross_layer_blocks", context=context)
        except BaseException as error:  # noqa: BLE001  see spare
            spare(error)
            reason = f"raised an error when asked to vote: {told(error)}"
            plugins = plugins.without(info.name, reason)
            continue
        vote = Vote(said) if said is None or isinstance(said, bool) else said
        if type(vote) is not Vote:
            reason = f"voted {shown(said)}; possible: True, False, None or a Vote"
            plugins = plugins.without(info.name, reason)
            continue
        votes.append(
            CastVote(
                plugin=info.name, priority=info.priority, answer=vote.answer, reason=vote.reason
            )
        )
    return votes, plugins


def register_layers(started: StartUp, caches: KVCaches) -> Registration:
    """Asks the policies, by priority, to register the engine's tensors, and proves the answer.

    Raises:
        RegistrationError: tensors that contradict the context; a registration that is wrong.
        CertificationError: no policy takes these layers.
    """
    context = started.context
    if wrong := check_caches(context, caches):
        raise started.refused(RegistrationError("the engine's tensors are refused", wrong))
    for plugin in started.plugins.having("register_layers"):
        answer = _answer(started, plugin, caches)
        if answer is None:
            continue
        if wrong := verify(context, caches, answer) or _uncopyable(started, answer):
            raise started.refused(
                _blamed(plugin, "made a registration that cannot be proved", wrong)
            )
        return answer
    pages = "canonical pages" if context.canonical else "pages"
    decision = started.decision
    why = Refusal(
        "uncertified",
        f"no policy takes {pages} in {decision.layout}, which "
        f"{decision.decided_by or 'nobody'} decided; lower that plugin's priority, or install a "
        "plugin that registers them",
    )
    raise started.refused(
        CertificationError(
            f"no policy registers {pages} in {decision.layout}",
            dict.fromkeys(context.stage_layers, why),
        )
    )


def prepare_rows(started: StartUp, rows: torch.Tensor, device: str) -> tuple[object, ...]:
    """Shows the copy engines the pool's rows before the first job.

    Returns:
        What they answer, to be kept as long as jobs may come.

    Raises:
        RegistrationError: one of them raises; it is named.
        OptionError: one of them refuses what its user has set.
    """
    held = []
    for plugin in started.plugins.having("transfer"):
        if (prepare := plugin.functions.get("prepare_rows")) is None:
            continue
        try:
            held.append(prepare(rows, device))
        except OptionError:
            raise  # what its user has set is wrong, and not the plugin
        except BaseException as error:
            spare(error)
            what = f"raised {told(error)} when it was to prepare the host rows"
            raise started.refused(_blamed(plugin, what, {})) from error
    return tuple(held)


def _uncopyable(started: StartUp, registration: Registration) -> Mapping[str, Refusal]:
    """Layers whose registered page and certified page no single box joins."""
    rank = started.context.rank
    return {
        name: Refusal(
            "page-contradicts-spec",
            "the registered page and the certified one are cut at points that do not divide one "
            "another; register it row by row",
        )
        for record in started.records.values()
        for name in record.group.layer_names
        if name in registration.pages
        and compose(normal(registration.pages[name].page.box), record.part(rank, name).box) is None
    }


def _answer(started: StartUp, plugin: Plugin, caches: KVCaches) -> Registration | None:
    try:
        answer = plugin.call(
            "register_layers", context=started.context, decision=started.decision, caches=caches
        )
    except RegistrationError as error:
        raise started.refused(
            _blamed(plugin, f"refuses: {error.message}", error.refusals)
        ) from error
    except BaseException as error:
        spare(error)
        what = f"raised {told(error)}"
        raise started.refused(_blamed(plugin, what, {})) from error
    if answer is not None and type(answer) is not Registration:
        raise started.refused(
            _blamed(plugin, f"answered {shown(answer)}, not a Registration or None", {})
        )
    return answer


def _blamed(plugin: Plugin, message: str, refusals: Mapping[str, Refusal]) -> RegistrationError:
    info = plugin.info
    return RegistrationError(
        f"plugin {info.described} {message}",
        refusals,
        plugin_name=info.name,
        distribution=info.distribution,
        version=info.version,
    )
