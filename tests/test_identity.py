"""What names stored bytes, and what peers of one engine compare; C15, C23 and invariant 6."""

import itertools
import os
import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.certify import Certificate
from kvpolicy.context import PolicyContext
from kvpolicy.decision import CastVote, decide
from kvpolicy.geometry import CacheGeometry, LayerGroup
from kvpolicy.grid import ParallelGrid
from kvpolicy.identity import digest, fingerprint, format_id, group_format
from kvpolicy.layout import KVCacheLayout
from kvpolicy.records import group_records, prove_layers
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
PLUGINS = [("canonical", "kvpolicy", "0.1.0", 100), ("direct", "kvpolicy", "0.1.0", -100)]


def attention(**changes):
    sizes = {"block_size": 16, "total_kv_heads": 8, "head_size": 64, "itemsize": 2}
    return AttentionSpec(**{**sizes, **changes})


def latent(**changes):
    return LatentSpec(**{"block_size": 16, "row_bytes": 64, **changes})


def numbered(*specs):
    return {f"layer.{n}": spec for n, spec in enumerate(specs)}


LAYERS = numbered(attention(), attention())


def start(layers=None, grid=None, *, slab=False, votes=None, stages=None, groups=None, **more):
    """(context, decision, formats by group)."""
    geometry = CacheGeometry(
        layers=layers or LAYERS, num_blocks=more.pop("num_blocks", 8), stages=stages, groups=groups
    )
    more = {"canonical": True, "dtype": "bfloat16", **more}
    context = PolicyContext(geometry=geometry, grid=ParallelGrid(**(grid or {})), **more)
    votes = votes or [CastVote(plugin="test", priority=0, answer=slab)]
    decision = decide(votes, context.layout)
    proofs = prove_layers(context, decision)
    assert all(isinstance(proof, Certificate) for proof in proofs.values()), proofs
    records = group_records(context, proofs)
    formats = {name: group_format(context, decision, record) for name, record in records.items()}
    return context, decision, formats


def id_of(*arguments, **named):
    return format_id(start(*arguments, **named)[2])


def print_of(*arguments, plugins=PLUGINS, **named):
    context, decision, formats = start(*arguments, **named)
    return fingerprint(context, decision, formats, plugins)


def format_of(*arguments, **named):
    formats = start(*arguments, **named)[2]
    assert len(formats) == 1
    return next(iter(formats.values()))


# --- format ids: what they name, and what they do not ------------------------------------------

CHANGES = {
    "head size": {"layers": numbered(attention(head_size=128), attention())},
    "value head size": {"layers": numbered(attention(v_head_size=32), attention())},
    "head count": {"layers": numbered(attention(), attention(total_kv_heads=4))},
    "item size": {"layers": numbered(*[attention(itemsize=1)] * 2)},
    "scales": {"layers": numbered(*[attention(scale_bytes=4)] * 2)},
    "packing": {"layers": numbered(*[attention(kv_packing="split")] * 2)},
    "packing of one layer": {"layers": numbered(attention(), attention(kv_packing="split"))},
    "kind": {"layers": numbered(attention(), latent(row_bytes=4096))},
    "a layer more": {"layers": numbered(*[attention()] * 3)},
    "a layer's name": {"layers": {"layer.0": attention(), "layer.2": attention()}},
    "order of layers": {"layers": dict(reversed(LAYERS.items()))},
    "tokens of a block": {"layers": numbered(*[attention(block_size=32)] * 2)},
    "span by pcp": {"grid": {"pcp": 2}},
    "span by dcp": {"grid": {"tp": 16, "dcp": 2}},
    "head/token order": {"layout": "nhd"},
    "canonical order": {"canonical_order": "nhd"},
    "dtype": {"dtype": "float16"},
    "no dtype": {"dtype": ""},
    "encoding": {"encoding": "fp8_e4m3"},
    "canonical": {"canonical": False},
}


@pytest.mark.parametrize("change", CHANGES)
def test_c23_invariant_6_this_changes_the_format_id(change):
    assert id_of(**CHANGES[change]) != id_of()


def test_c23_no_two_of_these_changes_share_an_id():
    found = {change: id_of(**named) for change, named in CHANGES.items()}
    same = [pair for pair in itertools.combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    # Equal spans are equal formats, however they come about; so are equal orders.
    assert same == [
        ("tokens of a block", "span by pcp"),
        ("tokens of a block", "span by dcp"),
        ("span by pcp", "span by dcp"),
        ("head/token order", "canonical order"),
    ]


@pytest.mark.parametrize(
    "named",
    [
        {"grid": {"tp": 2}},
        {"grid": {"tp": 8}},
        {"grid": {"tp": 32}},
        {"grid": {"pp": 2}},
        {"grid": {"tp": 4, "pp": 2}, "stages": [1, 1]},
        {"grid": {"cp_interleave": 4}},
        {"slab": True},
        {"layout": "nhd", "canonical_order": "hnd"},
        {"layout": "BHLNC"},
        {"num_blocks": 99},
        {"layers": numbered(*[attention(page_padding=64)] * 2)},
        {"layers": numbered(*[attention(kernel_block_size=4)] * 2)},
        {"groups": [LayerGroup(name="mine", layer_names=LAYERS)]},
        {"dtype": "torch.bfloat16"},
        {"options": {"kvpolicy": {"priority": {"canonical": 7}}}},
        {"votes": [CastVote(plugin="other", priority=9, answer=False)]},
    ],
    ids=str,
)
def test_c15_invariant_6_this_does_not_change_a_portable_format_id(named):
    """Topology, plugins and where pages lie: the stored bytes are the same."""
    assert id_of(**named) == id_of()
    assert format_of(**named) == format_of()


def test_block_16_at_cp_2_is_block_32_at_cp_1():
    wide = numbered(*[attention(block_size=32)] * 2)
    for grid in ({"pcp": 2}, {"pcp": 2, "cp_interleave": 8}, {"tp": 16, "dcp": 2}):
        assert id_of(grid=grid) == id_of(wide)
    assert format_of(grid={"pcp": 2}).fields["tokens"] == 32


def test_c20_601_tokens_at_dcp2_are_18_full_blocks():
    tokens = format_of(numbered(latent()), {"tp": 2, "dcp": 2}).fields["tokens"]
    assert 601 // tokens == 18


specs = st.one_of(
    st.builds(
        attention,
        block_size=st.sampled_from([2, 4]),
        total_kv_heads=st.sampled_from([1, 2]),
        head_size=st.sampled_from([1, 2]),
        itemsize=st.sampled_from([1, 2]),
        kv_packing=st.sampled_from(["packed", "split"]),
        scale_bytes=st.sampled_from([0, 1]),
        page_padding=st.sampled_from([0, 8]),
    ),
    st.builds(latent, block_size=st.sampled_from([2, 4]), row_bytes=st.sampled_from([4, 8])),
)
engines = st.fixed_dictionaries(
    {
        "layers": specs.flatmap(
            lambda one: st.lists(
                st.sampled_from([one, attrs.evolve(one, page_padding=16)]), min_size=1, max_size=2
            ).map(lambda several: numbered(*several))
        ),
        "grid": st.fixed_dictionaries(
            {"tp": st.sampled_from([1, 2]), "pcp": st.sampled_from([1, 2])}
        ),
        "layout": st.sampled_from(["hnd", "nhd"]),
        "canonical_order": st.sampled_from([None, "hnd"]),
        "dtype": st.sampled_from(["bfloat16", "float16"]),
        "encoding": st.sampled_from(["", "x"]),
    }
)


def meaning(engine):
    """Everything that the stored bytes depend on, spelt out."""
    described = []
    for name, spec in engine["layers"].items():
        tokens = spec.block_size * engine["grid"]["pcp"]
        if isinstance(spec, LatentSpec):
            described.append((name, "latent", tokens, spec.row_bytes))
        else:
            sizes = (spec.total_kv_heads, spec.head_size, spec.itemsize, spec.scale_bytes)
            described.append((name, spec.kv_packing, tokens, *sizes))
    order = engine["canonical_order"] or engine["layout"]
    return described, order, engine["dtype"], engine["encoding"]


@given(
    engines, st.lists(st.sampled_from(["layers", "grid", "layout", "dtype"]), max_size=2), engines
)
def test_invariant_6_ids_are_equal_exactly_where_the_bytes_mean_the_same(one, changed, other):
    """Two engines that differ in a few respects."""
    other = {key: (other if key in changed else one)[key] for key in one}
    assert (id_of(**one) == id_of(**other)) == (meaning(one) == meaning(other))


# --- private formats ---------------------------------------------------------------------------

TOPOLOGIES = {
    "tp 1": {},
    "tp 2": {"grid": {"tp": 2}},
    "tp 4": {"grid": {"tp": 4}},
    "pp 2": {"grid": {"pp": 2}},
    "pcp 2": {"grid": {"pcp": 2}},
    "pcp 2, interleave 2": {"grid": {"pcp": 2, "cp_interleave": 2}},
    "dcp 2": {"grid": {"tp": 16, "dcp": 2}},
    "tp 16": {"grid": {"tp": 16}},
    "slab": {"slab": True},
    "nhd": {"layout": "nhd"},
    "nhd slab": {"layout": "nhd", "slab": True},
}


def test_c15_private_records_of_two_topologies_or_layouts_never_share_an_id():
    found = {name: id_of(canonical=False, **named) for name, named in TOPOLOGIES.items()}
    assert len({*found.values()}) == len(TOPOLOGIES)
    assert not {*found.values()} & {id_of(**named) for named in TOPOLOGIES.values()}


def test_c15_stages_are_part_of_a_private_format():
    layers = numbered(*[attention()] * 3)
    ids = {id_of(layers, {"pp": 2}, canonical=False, stages=stages) for stages in ([1, 2], [2, 1])}
    assert len(ids) == 2
    portable = {id_of(layers, {"pp": 2}, stages=stages) for stages in ([1, 2], [2, 1])}
    assert portable == {id_of(layers)}


def test_a_state_carries_its_topology_even_when_canonical_and_the_rest_does_not():
    layers = {"a": attention(), "s": StateSpec(state_bytes=100)}
    one, two = (start(layers, {"tp": tp})[2] for tp in (1, 2))
    assert one["attention"].format_id == two["attention"].format_id
    assert one["state"].format_id != two["state"].format_id
    assert two["state"].fields["tp"] == 2
    assert "tp" not in two["attention"].fields
    assert format_id(one) != format_id(two)


def test_an_interleave_counts_only_where_tokens_are_spread():
    assert id_of(canonical=False, grid={"cp_interleave": 4}) == id_of(canonical=False)


# --- differences -------------------------------------------------------------------------------


def differences(*arguments, **named):
    return format_of().differences(format_of(*arguments, **named))


def test_no_difference_is_said_of_equal_formats():
    assert differences(grid={"tp": 4}) == ()


@pytest.mark.parametrize(
    ("named", "lines"),
    [
        ({"dtype": "float16"}, ["dtype: stored 'bfloat16', wanted 'float16'"]),
        ({"encoding": "fp8"}, ["encoding: stored '', wanted 'fp8'"]),
        ({"layout": "nhd"}, ["order: stored 'LBHNC', wanted 'LBNHC'"]),
        ({"grid": {"pcp": 2}}, ["tokens: stored 16, wanted 32"]),
        (
            {"layers": numbered(attention(), attention(kv_packing="split"))},
            ["layers layer.1, kv_packing: stored 'packed', wanted 'split'"],
        ),
        (
            {"layers": numbered(attention(head_size=32), attention())},
            [
                "layers layer.0, head_size: stored 64, wanted 32",
                "layers layer.0, v_head_size: stored 64, wanted 32",
            ],
        ),
        ({"layers": numbered(attention())}, ["layers: stored 2 of them, wanted 1"]),
        (
            {"canonical": False, "grid": {"tp": 2}},
            [
                "cp_interleave: stored None, wanted 1",
                "dcp: stored None, wanted 1",
                "form: stored 'canonical', wanted 'private'",
                "layout: stored None, wanted 'LBHNC'",
                "pcp: stored None, wanted 1",
                "pp: stored None, wanted 1",
                "stages: stored None, wanted [2]",
                "tp: stored None, wanted 2",
            ],
        ),
    ],
)
def test_differences_name_the_field(named, lines):
    assert list(differences(**named)) == lines


def test_layers_with_one_difference_are_told_together():
    layers = numbered(*[attention(head_size=32)] * 40)
    assert format_of(numbered(*[attention()] * 40)).differences(format_of(layers)) == (
        "layers layer.0-39 (40 layers), head_size: stored 64, wanted 32",
        "layers layer.0-39 (40 layers), v_head_size: stored 64, wanted 32",
    )


def test_many_differences_are_counted_not_listed():
    layers = numbered(*[attention(total_kv_heads=heads) for heads in range(2, 42)])
    mine, theirs = format_of(numbered(*[attention(total_kv_heads=1)] * 40)), format_of(layers)
    found = mine.differences(theirs)
    assert len(found) == 9
    assert found[0] == "layers layer.0, total_kv_heads: stored 1, wanted 2"
    assert found[-1] == "... and 32 more"


@given(engines, engines)
def test_formats_differ_exactly_where_a_difference_is_named(one, other):
    mine, theirs = (next(iter(start(**engine)[2].values())) for engine in (one, other))
    assert bool(mine.differences(theirs)) == (mine.format_id != theirs.format_id)


# --- the same everywhere -----------------------------------------------------------------------


def test_invariant_6_every_rank_computes_the_same_ids():
    grid = {"tp": 4, "pp": 2, "pcp": 2}
    for canonical in (True, False):
        named = {"grid": grid, "canonical": canonical}
        assert len({id_of(rank=rank, **named) for rank in range(16)}) == 1
        assert len({print_of(rank=rank, **named) for rank in range(16)}) == 1


def test_the_order_of_groups_and_plugins_names_nothing():
    layers = {"a": attention(), "b": latent()}
    groups = [LayerGroup(name="x", layer_names=["a"]), LayerGroup(name="y", layer_names=["b"])]
    for given_groups in (groups, groups[::-1]):
        assert id_of(layers, groups=given_groups) == id_of(layers)
        assert print_of(layers, groups=given_groups) == print_of(layers, plugins=PLUGINS[::-1])


@pytest.mark.parametrize(
    ("named", "format_too"),
    [
        ({"plugins": PLUGINS[:1]}, False),
        ({"plugins": [("canonical", "kvpolicy", "0.2.0", 100), PLUGINS[1]]}, False),
        ({"plugins": [("canonical", "theirs", "0.1.0", 100), PLUGINS[1]]}, False),
        ({"plugins": [("canonical", "kvpolicy", "0.1.0", 99), PLUGINS[1]]}, False),
        ({"grid": {"tp": 2}}, False),
        ({"grid": {"pp": 2}}, False),
        ({"slab": True}, False),
        ({"votes": [CastVote(plugin="other", priority=0, answer=False)]}, False),
        ({"dtype": "float16"}, True),
        ({"layers": numbered(attention())}, True),
    ],
    ids=str,
)
def test_what_changes_a_fingerprint(named, format_too):
    """Everything on which peers must agree; more than what names bytes."""
    assert print_of(**named) != print_of()
    without = {key: value for key, value in named.items() if key != "plugins"}
    assert (id_of(**without) != id_of()) == format_too


def test_losing_votes_and_reasons_change_no_fingerprint():
    winner = CastVote(plugin="test", priority=0, answer=False)
    loser = CastVote(plugin="zeal", priority=-1, answer=True, reason="faster")
    assert print_of(votes=[winner, loser]) == print_of()


SCRIPT = """
from kvpolicy.context import BackendCapabilities, PolicyContext
from kvpolicy.decision import CastVote, decide
from kvpolicy.geometry import CacheGeometry
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec
from kvpolicy.grid import ParallelGrid
from kvpolicy.identity import fingerprint, format_id, group_format
from kvpolicy.records import group_records, prove_layers

layers = {
    "a": AttentionSpec(block_size=16, total_kv_heads=8, head_size=64, itemsize=2),
    "b": LatentSpec(block_size=16, row_bytes=64),
    "c": StateSpec(state_bytes=100),
}
context = PolicyContext(
    geometry=CacheGeometry(layers=layers, num_blocks=8),
    grid=ParallelGrid(tp=2),
    canonical=True,
    dtype="bfloat16",
    backend=BackendCapabilities(layouts={"hnd", "nhd", "BLHNC", "BLNHC", "LHBNC", "BHLNC"}),
)
votes = [CastVote(plugin=name, priority=0, answer=False) for name in {"x", "y", "z"}]
decision = decide(votes, context.layout)
records = group_records(context, prove_layers(context, decision))
formats = {name: group_format(context, decision, record) for name, record in records.items()}
plugins = {(p, "d", "1", 0) for p in "abcdefgh"}
print(format_id(formats), fingerprint(context, decision, formats, plugins))
"""


def test_c23_two_processes_with_different_hash_seeds_compute_the_same_ids():
    found = []
    for seed in ("0", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found[0] == found[1]
    assert len({*found[0]}) == 2


def test_a_digest_is_32_hex_digits_whatever_the_text():
    assert len(digest({"a": ["ä", "\ud800", 1, None]})) == 32
    assert int(digest("x"), 16) > 0
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    assert digest("ä") != digest("a")


def test_format_version_1_keeps_its_ids():
    """Stored bytes are found by these; a change here is a new format version."""
    assert format_of().fields["version"] == 1
    assert format_of().format_id == "eb26946a1fa6b2d3f18d03259196ddbf"
    assert (
        format_of(canonical=False, grid={"tp": 2}).format_id == "a8af274ec97fb045a454ecc734fc77dd"
    )
