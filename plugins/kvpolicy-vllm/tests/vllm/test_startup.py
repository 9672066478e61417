"""What cannot be served stops the engine, with a sentence that says why and what to do."""

from __future__ import annotations

import pytest
from harness import NEEDS_VLLM, SLABS, connector, run

import kvpolicy

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu_bytes_to_use": None}, "needs cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "8GiB"}, "found '8GiB'"),
        ({"cpu_bytes_to_use": 4096}, "less than one chunk of 1 block"),
        ({"canonical_layout": "yes"}, "canonical_layout is true or false"),
        ({"kvpolicy": "slab"}, "is a mapping of options, not 'slab'"),
        ({"kvpolicy": {"plugin": []}}, "did you mean 'plugins'?"),
        ({"kvpolicy": {"plugins": ["slap"]}}, "slap"),
        ({"spec_name": "CPUOffloadingSpec"}, "KVPolicyConnector brings its own"),
    ],
)
def test_a_wrong_setting_stops_the_engine_with_its_reason(models, change, words):
    _, log = run(models, [], connector(**change), ends_badly=True)
    assert words in log


def test_canonical_pages_that_nobody_certifies_stop_the_engine(models):
    """A raised priority decides for a slab in which `cross-layer` cannot certify a page."""
    config = connector(
        canonical_layout=True, kvpolicy={"plugins": [], "priority": {"cross-layer": 200}}
    )
    _, log = run(models, [], config, layouts=SLABS, ends_badly=True)
    assert "model.layers.0-3.self_attn.attn (4 layers): uncertified" in log
    assert "which cross-layer decided; lower that plugin's priority" in log


def test_opposite_votes_at_one_priority_stop_the_engine(models, outside):
    options = {"plugins": ["acme-slab", "acme-layers"], "priority": {"acme-layers": 300}}
    config = connector(canonical_layout=True, kvpolicy=options)
    _, log = run(models, [], config, layouts=SLABS, path=outside, ends_badly=True)
    assert "opposite votes at priority 300: 'acme-layers' votes per-layer" in log
    assert "'acme-slab' votes cross-layer (acme moves whole blocks)" in log


def test_a_plugin_at_fault_stops_an_engine_that_is_strict(models, outside):
    config = connector(kvpolicy={"plugins": ["acme-broken"], "strict": True})
    _, log = run(models, [], config, path=outside, ends_badly=True)
    assert "acme-broken" in log
    assert "acme-kv 3.1" in log
    assert "has no attribute 'forgotten'" in log


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.parametrize("value", [None, "8GB", True, 0, -1, float("nan"), float("inf")])
def test_a_capacity_that_is_no_number_of_bytes_is_refused(value):
    from kvpolicy_vllm.spec import _capacity

    with pytest.raises(kvpolicy.KVPolicyError, match="needs cpu_bytes_to_use, the bytes of host"):
        _capacity(value)


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.parametrize("value", [None, "two", True, -1, 1.5])
def test_an_option_that_is_no_whole_number_is_refused_by_name(value):
    from kvpolicy_vllm.spec import _whole

    with pytest.raises(kvpolicy.KVPolicyError, match="'s store_threshold is a whole number >= 0;"):
        _whole("store_threshold", value)
