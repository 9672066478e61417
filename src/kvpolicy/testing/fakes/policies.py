"""Policies that are wrong on purpose, each in one way; `Voter` and `AnyLayout` are right."""

from __future__ import annotations

import attrs
import torch

from kvpolicy import (
    Box,
    Dim,
    KVCaches,
    LayerPages,
    LayoutDecision,
    PolicyContext,
    Registration,
    RegistrationError,
    StridedPage,
    Vote,
    hookimpl,
)


class Voter:
    """Votes one way whatever it is asked: abstains with None, disagrees with True or False."""

    def __init__(self, answer: bool | None, reason: str = "it was told to") -> None:
        self.answer, self.reason = answer, reason

    def __repr__(self) -> str:
        return f"Voter({self.answer})"

    @hookimpl
    def prefer_cross_layer_blocks(self) -> Vote:
        """The answer with its reason."""
        return Vote(self.answer, self.reason)


class AnyLayout:
    """Votes on nothing and registers whatever the core can read off the strides, slabs too."""

    @hookimpl
    def register_layers(
        self, context: PolicyContext, decision: LayoutDecision, caches: KVCaches
    ) -> Registration | None:
        """The core's own reading."""
        del decision
        return Registration.from_caches(context, caches)


# Policies that vote wrongly.


class RaisingVoter:
    """Raises instead of abstaining."""

    @hookimpl
    def prefer_cross_layer_blocks(self) -> None:
        """Raises."""
        raise ValueError("no opinion")


class TextVoter:
    """Votes with a word."""

    @hookimpl
    def prefer_cross_layer_blocks(self) -> str:
        """A word."""
        return "yes"


class NumberVoter:
    """Votes 0, which is False for Python and no answer for kvpolicy."""

    @hookimpl
    def prefer_cross_layer_blocks(self) -> int:
        """A number."""
        return 0


class FickleVoter:
    """Changes its mind with every call."""

    def __init__(self) -> None:
        self.calls = 0

    @hookimpl
    def prefer_cross_layer_blocks(self) -> bool:
        """True and False in turn."""
        self.calls += 1
        return self.calls % 2 == 0


class RankVoter:
    """Votes by rank, so that an engine's ranks disagree."""

    @hookimpl
    def prefer_cross_layer_blocks(self, context: PolicyContext) -> bool:
        """True on every second rank."""
        return context.rank % 2 == 0


class Meddler(AnyLayout):
    """Writes into the context that it was only to look at, and so renames what is stored."""

    @hookimpl
    def prefer_cross_layer_blocks(self, context: PolicyContext) -> None:
        """Changes how stored elements are said to be encoded."""
        object.__setattr__(context, "encoding", "meddled")


# Policies that register wrongly.


class NoRegistration(AnyLayout):
    """Says "not mine" to everything."""

    @hookimpl
    def register_layers(
        self, context: PolicyContext, decision: LayoutDecision, caches: KVCaches
    ) -> Registration | None:
        """None."""
        del context, decision, caches
        return None


class _Lie(AnyLayout):
    """An honest registration, then `lie`."""

    @hookimpl
    def register_layers(
        self, context: PolicyContext, decision: LayoutDecision, caches: KVCaches
    ) -> Registration | None:
        """The core's own reading, falsified."""
        del decision
        honest = Registration.from_caches(context, caches)
        return Registration(pages=self.lie(dict(honest.pages)))

    def lie(self, pages: dict[str, LayerPages]) -> dict[str, LayerPages]:
        """What is registered instead."""
        raise NotImplementedError


class HalfRegistration(_Lie):
    """Registers only the first half of the layers, or none of one."""

    def lie(self, pages: dict[str, LayerPages]) -> dict[str, LayerPages]:
        """Half of them."""
        return dict(list(pages.items())[: len(pages) // 2])


class ShiftedRegistration(_Lie):
    """Registers pages one byte further on."""

    def lie(self, pages: dict[str, LayerPages]) -> dict[str, LayerPages]:
        """Shifted pages."""
        return {
            name: attrs.evolve(one, page=attrs.evolve(one.page, offset=one.page.offset + 1))
            for name, one in pages.items()
        }


class OverlappingRegistration(_Lie):
    """Registers blocks one byte closer together than they are."""

    def lie(self, pages: dict[str, LayerPages]) -> dict[str, LayerPages]:
        """Pages that share bytes, or nearly do."""
        return {
            name: attrs.evolve(
                one, page=attrs.evolve(one.page, block_stride=one.page.block_stride - 1)
            )
            for name, one in pages.items()
        }


class DoubledRegistration(_Lie):
    """Registers the first byte of every page in place of all its bytes."""

    def lie(self, pages: dict[str, LayerPages]) -> dict[str, LayerPages]:
        """Pages whose runs all lie at one place."""
        return {
            name: attrs.evolve(
                one,
                page=StridedPage(
                    offset=one.page.offset,
                    block_stride=one.page.block_stride,
                    box=Box(1, (Dim(one.page.page_bytes, 0, 1),)),
                ),
            )
            for name, one in pages.items()
        }


class CopyingRegistration(_Lie):
    """Registers a copy of the engine's memory."""

    def lie(self, pages: dict[str, LayerPages]) -> dict[str, LayerPages]:
        """The same pages elsewhere."""
        copies: dict[int, torch.Tensor] = {}
        for one in pages.values():
            storage = one.tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=one.tensor.device)
            whole = raw.set_(storage, 0, (storage.nbytes(),), (1,))
            copies.setdefault(storage.data_ptr(), whole.clone())
        return {
            name: LayerPages(tensor=copies[one.tensor.untyped_storage().data_ptr()], page=one.page)
            for name, one in pages.items()
        }


class BareRefusal(AnyLayout):
    """Refuses what contradicts the context with an error that says nothing."""

    @hookimpl
    def register_layers(
        self, context: PolicyContext, decision: LayoutDecision, caches: KVCaches
    ) -> Registration | None:
        """The core's own reading, its refusals turned into a bare error."""
        del decision
        try:
            return Registration.from_caches(context, caches)
        except Exception:  # noqa: BLE001  this is the fault
            raise AssertionError from None


class MissingTolerated(AnyLayout):
    """Registers the layers that it finds, and says nothing of those that are missing."""

    @hookimpl
    def register_layers(
        self, context: PolicyContext, decision: LayoutDecision, caches: KVCaches
    ) -> Registration | None:
        """The core's own reading of what is there."""
        del decision
        try:
            return Registration.from_caches(context, caches)
        except RegistrationError as error:
            if any(why.code != "layer-missing" for why in error.refusals.values()):
                raise
            return Registration(pages={})
