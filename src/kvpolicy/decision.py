"""Votes, and the rule by which they become one decision."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvpolicy.errors import OptionError, PolicyConflictError
from kvpolicy.layout import KVCacheLayout


@attrs.frozen
class Vote:
    """A policy's answer to ``prefer_cross_layer_blocks``.

    Attributes:
        answer: True for cross-layer blocks, False for per-layer, None to abstain.
        reason: one sentence for people.
    """

    answer: bool | None = attrs.field()
    reason: str = attrs.field(default="")

    def __attrs_post_init__(self) -> None:
        if self.answer is not None and not isinstance(self.answer, bool):
            raise OptionError(f"a vote answers True, False or None, not {self.answer!r}")
        if not isinstance(self.reason, str):
            raise OptionError(f"a vote's reason is a sentence, not {self.reason!r}")


@attrs.frozen(kw_only=True)
class CastVote:
    """A vote with who cast it, and at which priority."""

    plugin: str
    priority: int
    answer: bool | None
    reason: str = ""


def _layout(value: str | KVCacheLayout) -> KVCacheLayout:
    return KVCacheLayout.parse(value)


def _votes(votes: Iterable[CastVote]) -> tuple[CastVote, ...]:
    return tuple(votes)


@attrs.frozen(kw_only=True)
class LayoutDecision:
    """What the votes came to; the only place where the layout is decided.

    Attributes:
        cross_layer_blocks: whether all layers of a block lie side by side.
        layout: LBHNC, LBNHC (per-layer), BLHNC or BLNHC (cross-layer).
        decided_by: the plugin that decided, first by name if several agree; None: nobody voted.
        votes: every vote, abstentions too, by priority (high first), then name.
    """

    cross_layer_blocks: bool
    layout: KVCacheLayout = attrs.field(converter=_layout)
    decided_by: str | None = None
    votes: tuple[CastVote, ...] = attrs.field(default=(), converter=_votes)


def _by_rank(vote: CastVote) -> tuple[int, str]:
    return -vote.priority, vote.plugin


def decide(votes: Iterable[CastVote], layout: KVCacheLayout) -> LayoutDecision:
    """The conflict rule: the highest priority at which somebody does not abstain decides.

    Raises:
        PolicyConflictError: opposite votes at that priority.
    """
    cast = tuple(sorted(votes, key=_by_rank))
    heard = [vote for vote in cast if vote.answer is not None]
    top = [vote for vote in heard if vote.priority == heard[0].priority]
    answers = {vote.answer for vote in top}
    if len(answers) > 1:
        said = "; ".join(
            f"{vote.plugin!r} votes {'cross-layer' if vote.answer else 'per-layer'}"
            + (f" ({vote.reason})" if vote.reason else "")
            for vote in top
        )
        loudest = top[0]
        raise PolicyConflictError(
            f"opposite votes at priority {loudest.priority}: {said}. Raise one of them, for "
            f"instance KVPOLICY_PRIORITY={loudest.plugin}={loudest.priority + 1} or --priority "
            f"{loudest.plugin}={loudest.priority + 1}, or, if one is not built in, leave it out of "
            "KVPOLICY_PLUGINS",
            [vote.plugin for vote in top],
            loudest.priority,
        )
    cross_layer = bool(top) and bool(top[0].answer)
    return LayoutDecision(
        cross_layer_blocks=cross_layer,
        layout=layout.slab if cross_layer else layout.order,
        decided_by=top[0].plugin if top else None,
        votes=cast,
    )
