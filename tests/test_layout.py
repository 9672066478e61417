"""Six layouts, their aliases and predicates; C4."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.certify import certify
from kvpolicy.context import BackendCapabilities, PolicyContext
from kvpolicy.errors import LayoutError
from kvpolicy.geometry import CacheGeometry
from kvpolicy.grid import ParallelGrid
from kvpolicy.layout import KVCacheLayout
from kvpolicy.specs import AttentionSpec

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
SPEC = AttentionSpec(block_size=4, total_kv_heads=4, head_size=8, itemsize=2)


def predicates(layout):
    return (
        layout.heads_first,
        layout.layer_compact,
        layout.block_outermost,
        layout.block_compact,
        layout.block_contiguous,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # heads first, layer compact, block outermost, block compact, block contiguous
        ("LBHNC", (True, True, False, True, True)),
        ("LBNHC", (False, True, False, True, False)),
        ("LHBNC", (True, True, False, False, False)),
        ("BLHNC", (True, False, True, True, True)),
        ("BLNHC", (False, False, True, True, False)),
        ("BHLNC", (True, False, True, False, False)),
    ],
)
def test_predicates_of_each_of_the_six(name, expected):
    assert predicates(KVCacheLayout.parse(name)) == expected


def test_there_are_six():
    assert len(KVCacheLayout) == 6


@pytest.mark.parametrize("name", ["HND", "hnd", "Hnd", " hnd ", "LBHNC", "lbhnc"])
def test_c4_hnd_and_lbhnc_are_one_layout(name):
    assert KVCacheLayout.parse(name) is HND


@pytest.mark.parametrize("name", ["NHD", "nhd", "LBNHC", "\tlbnhc\n"])
def test_c4_nhd_is_lbnhc_and_not_lbhnc(name):
    assert KVCacheLayout.parse(name) is NHD
    assert KVCacheLayout.parse(name) is not HND


def test_c4_aliases_are_one_wherever_a_layout_is_given():
    geometry = CacheGeometry(layers={"a": SPEC}, num_blocks=2)

    def context(name):
        return PolicyContext(geometry=geometry, layout=name, canonical=True, canonical_order=name)

    assert context("hnd") == context("LBHNC") == context(HND)
    assert context("nhd") != context("LBHNC")
    assert BackendCapabilities(layouts=["hnd", "LBHNC"]).layouts == frozenset({HND})
    assert BackendCapabilities(layouts="nhd").layouts == frozenset({NHD})
    assert certify(SPEC, ParallelGrid(), "hnd", "HND") == certify(SPEC, ParallelGrid(), HND, HND)
    assert certify(SPEC, ParallelGrid(), "nhd") != certify(SPEC, ParallelGrid(), HND)


@given(st.sampled_from(KVCacheLayout), st.randoms())
def test_c4_every_name_in_any_case_is_its_layout(layout, random):
    name = "".join(random.choice([c.lower(), c.upper()]) for c in layout.value)
    assert KVCacheLayout.parse(name) is KVCacheLayout.parse(layout) is layout


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_order_and_slab_keep_the_head_token_order(layout):
    assert layout.order.layer_compact
    assert layout.order.block_compact
    assert layout.slab.block_outermost
    assert layout.slab.block_compact
    assert layout.order.heads_first == layout.slab.heads_first == layout.heads_first
    assert str(layout) == layout.value


@pytest.mark.parametrize(
    ("name", "close"), [("LBHCN", "'LBHNC'"), ("HDN", "'HND'"), ("blhn", "'BLHNC'")]
)
def test_a_misspelt_layout_is_refused_with_close_names(name, close):
    with pytest.raises(LayoutError, match="no KV cache layout") as error:
        KVCacheLayout.parse(name)
    assert repr(name) in str(error.value)
    assert close in str(error.value)


def test_a_name_near_nothing_is_refused_with_all_names():
    with pytest.raises(LayoutError) as error:
        KVCacheLayout.parse("1234")
    for name in [*KVCacheLayout.__members__, "HND", "NHD"]:
        assert name in str(error.value)


@pytest.mark.parametrize("value", [None, 3, True, b"HND", ["HND"]])
def test_a_layout_is_given_by_name(value):
    with pytest.raises(LayoutError, match=type(value).__name__):
        KVCacheLayout.parse(value)
