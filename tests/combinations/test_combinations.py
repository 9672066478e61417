"""Invariants of plugins together: random subsets, priorities and contexts, real bytes.

Run with our own plugins installed (``make test`` does); the broken ones of ``tests/dists`` join.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import kvpolicy
from kvpolicy.cli.engine import SimulatedRank

DISTS = Path(__file__).parent.parent / "dists"
OURS = ("slab", "numba", "cuda")
GOOD = ("good",)
FAULTY = ("raises_in_vote", "wrong_vote", "a_class", "misspelt_hook", "import_error")
NEVER_LOADED = ("a_class", "misspelt_hook", "import_error")
BUILT_IN = ("canonical", "cross-layer", "direct", "host-copy")
BLOCKS = 5


@pytest.fixture(autouse=True, scope="module")
def _test_distributions():
    added = [str(DISTS / name) for name in (*GOOD, *FAULTY)]
    sys.path[:0] = added
    yield
    for path in added:
        sys.path.remove(path)
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def layers(kind):
    spec = kvpolicy.AttentionSpec(block_size=4, total_kv_heads=4, head_size=4, itemsize=2)
    if kind == "latent":
        spec = kvpolicy.LatentSpec(block_size=4, row_bytes=10)
    if kind == "split":
        spec = attrs.evolve(spec, kv_packing="split")
    if kind == "kernel blocks":
        spec = attrs.evolve(spec, kernel_block_size=2)
    found = {f"layer.{i}": spec for i in range(3)}
    if kind == "hybrid":
        found["layer.1"] = kvpolicy.StateSpec(state_bytes=24)
    return found


KINDS = ("packed", "split", "latent", "kernel blocks", "hybrid")


@st.composite
def combinations(draw):
    """Plugins with priorities, and a storing and a loading context."""
    names = draw(st.lists(st.sampled_from([*OURS, *GOOD, *FAULTY]), unique=True))
    names = [name.replace("_", "-") for name in names]
    placed = st.dictionaries(st.sampled_from([*BUILT_IN[:3], *names]), st.integers(-200, 200))
    priorities = draw(placed)
    kind = draw(st.sampled_from(KINDS))
    order = st.sampled_from(["HND", "NHD"])
    values = {
        "geometry": kvpolicy.CacheGeometry(layers=layers(kind), num_blocks=BLOCKS),
        "canonical": draw(st.booleans()),
        "canonical_order": draw(st.none() | order),
        "backend": kvpolicy.BackendCapabilities(
            stride_aware=draw(st.sampled_from([True, True, False, None]))
        ),
    }
    sides = []
    for _ in range(2):
        grid = kvpolicy.ParallelGrid(
            tp=draw(st.sampled_from([1, 2, 4, 8])), pp=draw(st.sampled_from([1, 1, 3]))
        )
        sides.append(kvpolicy.PolicyContext(**values, grid=grid, layout=draw(order)))
    return names, priorities, sides


def started(context, plugins, pool=None):
    """The connectors of every rank with their engines, or the refusal that stopped start-up."""
    found = []
    try:
        for rank in context.grid.ranks():
            own = attrs.evolve(context, rank=rank.rank)
            connector = kvpolicy.Connector(own, plugins, host=pool)
            engine = SimulatedRank(own, connector.decision)
            engine.clear()
            connector.register(engine.caches)
            found.append((connector, engine))
    except kvpolicy.KVPolicyError as refusal:
        return refusal
    return found


def moved(ranks, storing, used, slots):
    """Stores or loads every group on every rank; every result is good."""
    for connector, engine in ranks:
        for group, held in engine.groups(list(connector.formats)):
            if storing:
                for name in held:
                    engine.fill(name, used, range(len(used)))
                connector.store(used, slots[group], group)
            else:
                connector.load(slots[group], used, group)
    for connector, _ in ranks:
        assert all(result.ok for result in connector.wait())


@settings(max_examples=300)
@given(combinations(), st.randoms(use_true_random=False))
def test_plugins_together_keep_the_invariants(combination, shuffled):
    names, priorities, (storing, loading) = combination
    selection = kvpolicy.select(names=names, priorities=priorities, environ={})
    plugins = kvpolicy.load_plugins(selection)
    # Isolation: whoever is faulty is listed, and nobody else.
    failed = {info.name for info in plugins.infos if info.status == "failed"}
    assert failed == {name for name in names if name.replace("-", "_") in NEVER_LOADED}
    ones = started(storing, plugins, pool := kvpolicy.HostPool(6 * 2))
    again = list(names)
    shuffled.shuffle(again)
    same = kvpolicy.load_plugins(kvpolicy.select(names=again, priorities=priorities, environ={}))
    other = started(storing, same)
    if isinstance(ones, kvpolicy.KVPolicyError):
        # Fail closed, with a reason, and the same one in any order.
        event(f"refused: {type(ones).__name__}")
        assert (type(ones), str(ones)) == (type(other), str(other))
        assert isinstance(
            ones,
            kvpolicy.PolicyConflictError | kvpolicy.CertificationError,
        )
        return
    # Order-free, and the same everywhere.
    first = json.dumps(ones[0][0].explain(), sort_keys=True)
    assert {json.dumps(c.explain(), sort_keys=True) for c, _ in [*ones, *other]} == {first}
    assert len({connector.fingerprint for connector, _ in ones}) == 1
    if storing.canonical:
        portable = [layer["portable"] for layer in ones[0][0].explain()["layers"]]
        kinds = [spec.kind for spec in storing.geometry.layers.values()]
        assert portable == [kind != "state" for kind in kinds]
    # Round trip and containment, where the formats agree; a refusal that names fields, where not.
    used, numbers = [4, 0, 2], itertools.count()
    groups = list(ones[0][0].formats)
    slots = {group: [next(numbers) for _ in used] for group in groups}
    moved(ones, True, used, slots)
    twos = started(loading, plugins, pool)
    if isinstance(twos, kvpolicy.KVPolicyError):
        return
    if twos[0][0].format_id != ones[0][0].format_id:
        event("another format")
        wanted = next(g for g in groups if twos[0][0].formats[g] != ones[0][0].formats[g])
        with pytest.raises(kvpolicy.FormatMismatchError, match="stored"):
            twos[0][0].load(slots[wanted], used, wanted)
        return
    event(f"loaded, decided by {ones[0][0].decision.decided_by}")
    moved(twos, False, [1, 3, 0], slots)
    for _, engine in twos:
        for name in engine.layers:
            assert engine.mismatches(name, [1, 3, 0], range(3)) == 0
            assert engine.changed(name, [1, 3, 0]) == 0


def test_our_plugins_are_really_installed():
    found = kvpolicy.load_plugins(kvpolicy.select(environ={})).infos
    installed = {info.name: info for info in found}
    assert set(OURS) <= set(installed)
    assert installed["slab"].distribution == "kvpolicy-slab"
    assert installed["slab"].status == "active"
