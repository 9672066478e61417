"""The hooks' version: a newer one is refused in words, an older plugin keeps working.

tests/dists/first_api is a plugin written against the first version, and is never changed.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from pathlib import Path

import attrs
import pluggy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy
import kvpolicy.hooks as hooks
from kvpolicy import (
    AttentionSpec,
    CacheGeometry,
    Connector,
    ParallelGrid,
    PluginError,
    PolicyContext,
    hookimpl,
    load_plugins,
    select,
)
from kvpolicy.plugins import loading

DISTS = Path(__file__).parent / "dists"
# What the first version offers. Entries are added for versions to come, and none is taken away.
OFFERED = {
    1: {
        "prefer_cross_layer_blocks": {"context"},
        "register_layers": {"context", "decision", "caches"},
        "transfer": {"job"},
    },
}


@pytest.fixture
def installed(monkeypatch):
    """Installs one folder of tests/dists and loads it beside the built-ins."""

    def put(case, *, strict=False):
        monkeypatch.syspath_prepend(str(DISTS / case))
        names = [case.replace("_", "-")]
        return load_plugins(select(names=names, strict=strict, environ={}))

    yield put
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def info_of(plugins, name):
    return next(info for info in plugins.infos if info.name == name)


class Dated:
    """A plugin that says which API it needs."""

    def __init__(self, needed):
        self.requires_api = needed

    @hookimpl
    def prefer_cross_layer_blocks(self):
        return None


def dated(needed, *, strict=False):
    selection = select(names=(), strict=strict, environ={})
    return info_of(load_plugins(selection, {"dated": Dated(needed)}), "dated")


# Newer, equal, older.


@given(st.integers(-5, 5))
def test_an_api_is_refused_exactly_where_it_is_newer(ahead):
    needed = hooks.API_VERSION + ahead
    info = dated(needed)
    if ahead <= 0:
        assert (info.status, info.reason) == ("active", "")
        return
    assert info.status == "failed"
    assert info.reason == (
        f"requires plugin API {needed}, but this kvpolicy has {hooks.API_VERSION}; upgrade "
        "kvpolicy or install an older version of the plugin"
    )
    with pytest.raises(PluginError, match=f"'dated' requires plugin API {needed}"):
        dated(needed, strict=True)


def test_a_plugin_for_a_newer_api_is_refused_for_that_and_not_for_what_it_does(installed):
    """Its hook and its argument are unknown too, which would send its user the wrong way."""
    info = info_of(installed("newer_hook"), "newer-hook")
    assert (info.status, info.hooks) == ("failed", ())
    assert info.reason.startswith("requires plugin API 1000, but this kvpolicy has ")
    assert "compress_records" not in info.reason
    assert "topology_of_tomorrow" not in info.reason


def test_one_that_needs_a_newer_api_leaves_the_others_alone(installed):
    found = installed("newer_hook")
    assert "newer-hook" not in {plugin.info.name for plugin in found.active}
    assert {"canonical", "cross-layer", "direct", "host-copy"} <= {
        plugin.info.name for plugin in found.active
    }
    with pytest.raises(PluginError, match="newer-hook"):
        installed("newer_hook", strict=True)


# What the first version offers, for good.


@pytest.mark.parametrize("version", OFFERED)
def test_what_a_version_offers_is_still_offered(version):
    for name, arguments in OFFERED[version].items():
        assert name in hooks.HOOKS
        assert arguments <= set(inspect.signature(getattr(hooks, name)).parameters)


def test_every_version_is_written_down_here():
    assert list(OFFERED) == list(range(1, hooks.API_VERSION + 1))
    newest = {n: set(inspect.signature(getattr(hooks, n)).parameters) for n in hooks.HOOKS}
    assert OFFERED[hooks.API_VERSION] == newest, "what was added raises API_VERSION"


BLOCKS = 6
SPEC = AttentionSpec(block_size=4, total_kv_heads=2, head_size=8, itemsize=2)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_plugin_of_the_first_version_votes_registers_and_copies(installed, layout, rank):
    """Every byte is numbered by where it lies; a rank's half of the heads comes back alone."""
    plugins = installed("first_api")
    info = info_of(plugins, "first-api")
    assert (info.status, info.priority) == ("active", 170)
    assert info.hooks == ("prefer_cross_layer_blocks", "register_layers", "transfer")
    context = PolicyContext(
        geometry=CacheGeometry(layers={"a": SPEC, "b": SPEC}, num_blocks=BLOCKS),
        grid=ParallelGrid(tp=2),
        rank=rank,
        canonical=True,
        layout=layout,
        dtype="float16",
        options={"acme_first_api": True},
    )
    page = 4 * 32  # tokens of one head, rows of 32 B
    shape = (BLOCKS, 1, 4, 16) if layout == "HND" else (BLOCKS, 4, 1, 16)
    caches = {
        name: (torch.arange(BLOCKS * page).reshape(BLOCKS, page) * 7 + at)
        .remainder(251)
        .to(torch.uint8)
        for at, name in enumerate("ab")
    }
    written = {name: cache.clone() for name, cache in caches.items()}
    with Connector(context, plugins, host=4) as connector:
        assert connector.decision.decided_by == "first-api"
        votes = {vote.plugin: vote for vote in connector.decision.votes}
        assert votes["first-api"].reason == "2 layers lie apart"
        connector.register(
            {name: cache.view(torch.float16).reshape(shape) for name, cache in caches.items()}
        )
        connector.host.rows.fill_(0xFD)
        (stored,) = connector.wait([connector.store([5, 0, 1], [1, 3, 2])])
        assert (stored.ok, stored.bytes) == (True, 3 * 2 * page)
        rows = connector.host.rows.clone()
        for name in caches:
            assert torch.equal(caches[name], written[name])
            caches[name].fill_(0xFD)
        # The record holds both ranks' heads of layer a, then of layer b.
        for slot, block in ((1, 5), (3, 0), (2, 1)):
            record = rows[slot, : 2 * 2 * page].reshape(2, 2 * page)
            for at, name in enumerate("ab"):
                head = (
                    record[at].reshape(2, page)
                    if layout == "HND"
                    else record[at].reshape(4, 2, 32).transpose(0, 1).reshape(2, page)
                )
                assert torch.equal(head[rank], written[name][block])
                assert head[1 - rank].eq(0xFD).all()
        assert rows[0].eq(0xFD).all()
        connector.host.rows.copy_(rows)
        # The other rank's half is what completes the record.
        other = attrs.evolve(context, rank=1 - rank)
        with Connector(other, plugins, host=connector.host) as peer:
            mine = {
                name: torch.zeros(BLOCKS, page, dtype=torch.uint8).view(torch.float16)
                for name in caches
            }
            peer.register({name: cache.reshape(shape) for name, cache in mine.items()})
            (stored,) = peer.wait([peer.store([5, 0, 1], [1, 3, 2])])
            assert stored.ok
        (loaded,) = connector.wait([connector.load([1, 3, 2], [2, 3, 4])])
        assert (loaded.ok, loaded.bytes) == (True, 3 * 2 * page)
    for name, cache in caches.items():
        assert torch.equal(cache[[2, 3, 4]], written[name][[5, 0, 1]])
        assert cache[[0, 1, 5]].eq(0xFD).all()


def test_the_kept_plugin_names_the_first_version(installed):
    installed("first_api")
    assert sys.modules["acme_first_api"].policy.requires_api == 1


# The deprecation path: what is to go warns its author, and works.


@pytest.fixture
def deprecated(monkeypatch):
    """The hooks of a later version, of which one and an argument of another are deprecated."""
    marker = pluggy.HookspecMarker(hooks.PROJECT)
    later = types.ModuleType("later")

    @marker(firstresult=True, warn_on_impl=DeprecationWarning("transfer becomes move"))
    def transfer(job):
        """Deprecated."""

    @marker(
        firstresult=True,
        warn_on_impl_args={"caches": DeprecationWarning("caches becomes memory")},
    )
    def register_layers(context, decision, caches):
        """An argument is deprecated."""

    vars(later).update(
        prefer_cross_layer_blocks=hooks.prefer_cross_layer_blocks,
        register_layers=register_layers,
        transfer=transfer,
    )
    monkeypatch.setattr(loading, "specifications", later)


class Registers:
    @hookimpl
    def register_layers(self, context, caches):
        return None


class Transfers:
    @hookimpl
    def transfer(self, job):
        return None


def loaded_and_warned(plugin):
    """The plugins, and what warnings point into this file, where the plugin is written."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load_plugins(select(names=(), environ={}), {"mine": plugin})
    here = [one for one in caught if Path(one.filename).name == Path(__file__).name]
    assert all(one.category is DeprecationWarning for one in here)
    return found, [str(one.message) for one in here]


@pytest.mark.usefixtures("deprecated")
@pytest.mark.parametrize(
    ("plugin", "said"),
    [(Transfers, "transfer becomes move"), (Registers, "caches becomes memory")],
)
def test_what_is_deprecated_warns_at_the_author_s_own_line_and_still_works(plugin, said):
    found, warned = loaded_and_warned(plugin())
    assert info_of(found, "mine").status == "active"
    assert warned == [said]


@pytest.mark.usefixtures("deprecated")
def test_who_leaves_a_deprecated_argument_out_is_not_warned():
    class Newer:
        @hookimpl
        def register_layers(self, context):
            return None

    found, warned = loaded_and_warned(Newer())
    assert info_of(found, "mine").status == "active"
    assert warned == []


def test_nothing_is_deprecated_in_silence():
    """A hook that pluggy warns of is listed on the page of hooks, and no other is."""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "hooks.md").read_text("utf-8")
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    for name in hooks.HOOKS:
        spec = getattr(manager.hook, name).spec
        told = f"deprecated: `{name}`" in page
        assert told is bool(spec.warn_on_impl or spec.warn_on_impl_args)
    assert kvpolicy.hookimpl is hooks.hookimpl
