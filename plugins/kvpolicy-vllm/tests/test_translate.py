"""vLLM's values as kvpolicy's, with stand-ins of the same names and attributes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvpolicy_vllm import translate
from kvpolicy_vllm.compat import Backend
from kvpolicy_vllm.errors import VLLMConfigError

import kvpolicy

CPU = Backend(name="CPU_ATTN", platform="cpu", layouts=("LBHNC",))
ANY = Backend(name="ANY", platform="cuda")


class FullAttentionSpec:
    def __init__(self, **changes):
        self.block_size, self.num_kv_heads, self.num_head_slots = 128, 2, None
        self.head_size, self.head_size_v, self.dtype = 64, 64, SimpleNamespace(itemsize=2)
        self.tokens_per_state, self.scales, self.padding = 1, 0, 0
        vars(self).update(changes)

    @property
    def state_content_size_bytes(self):
        return (self.head_size + self.head_size_v) * self.dtype.itemsize + self.scales

    @property
    def unpadded_page_size_bytes(self):
        return self.num_kv_heads * self.block_size * self.state_content_size_bytes

    @property
    def page_size_bytes(self):
        return self.unpadded_page_size_bytes + self.padding


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    pass


class UniformTypeKVCacheSpecs:
    def __init__(self, specs):
        self.kv_cache_specs = specs


def latent(**changes):
    sizes = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 0}
    return MLAAttentionSpec(**sizes | changes)


def cache(*groups, num_blocks=8):
    found = [SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for names, spec in groups]
    return SimpleNamespace(kv_cache_groups=found, num_blocks=num_blocks)


def config(canonical=False, options=None, pool_file=None, cache_dtype="auto", rank=0, **others):
    sizes = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
        "rank": rank,
    }
    extra = {"canonical_layout": canonical, "kvpolicy": options or {}, "pool_file": pool_file}
    extra |= {name: value for name, value in others.items() if name not in sizes}
    parallel = {name: value for name, value in others.items() if name in sizes}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(**sizes | parallel),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(dtype="torch.bfloat16"),
    )


def stage(*groups, tp=2, heads=4, kernels=None):
    return translate.stage(cache(*groups), range(len(groups)), tp, heads, kernels or {})


def geometry(*groups, **sizes):
    return translate.geometry([stage(*groups, **sizes)], num_blocks=8)


def context(cached=None, backend=CPU, layout=None, isa="amx", is_as_asked=True, **changes):
    cached = cached or geometry((["layers.0"], FullAttentionSpec()))
    return translate.policy_context(
        config(**changes), cached, backend, lambda b, h: isa, layout, is_as_asked=is_as_asked
    )


def test_an_attention_spec_is_the_whole_models():
    found = translate.layer_spec(FullAttentionSpec(padding=64), 2, 4, 32)
    assert found == kvpolicy.AttentionSpec(
        block_size=128,
        total_kv_heads=4,
        head_size=64,
        itemsize=2,
        page_padding=64,
        kernel_block_size=32,
    )


def test_scales_beside_a_row_are_told_by_its_length():
    found = translate.layer_spec(FullAttentionSpec(scales=8), 2, 4, None)
    assert (found.scale_bytes, found.row_bytes) == (4, 128 * 2 + 8)


def test_a_latent_is_one_row_per_token_on_every_rank():
    found = translate.layer_spec(latent(), 2, 1, None)
    assert found == kvpolicy.LatentSpec(block_size=128, row_bytes=1152)


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        (SinkFullAttentionSpec(), "unknown-cache-spec", "SinkFullAttentionSpec"),
        (MambaSpec(), "unknown-cache-spec", "MambaSpec"),
        (FullAttentionSpec(tokens_per_state=4), "packing-unknown", "4 tokens"),
        (FullAttentionSpec(num_head_slots=1), "packing-unknown", "1 slots"),
        (FullAttentionSpec(scales=-64), "packing-unknown", "192 B"),
        (FullAttentionSpec(scales=3), "packing-unknown", "259 B"),
        (FullAttentionSpec(num_kv_heads=1), "heads-unknown", "the model has 4"),
    ],
)
def test_what_is_not_known_is_refused_and_never_taken_for_its_parent(spec, code, words):
    found = translate.layer_spec(spec, 2, 4, None)
    assert isinstance(found, kvpolicy.Refusal)
    assert found.code == code
    assert words in found.detail


def test_rows_that_hold_several_tokens_are_refused_in_the_words_of_either_version():
    older = FullAttentionSpec(storage_block_size=32)
    del older.tokens_per_state
    assert translate.layer_spec(older, 2, 4, None).code == "packing-unknown"
    older.storage_block_size = 128
    assert translate.layer_spec(older, 2, 4, None) == translate.layer_spec(
        FullAttentionSpec(), 2, 4, None
    )


@pytest.mark.parametrize(
    ("held", "tp", "model", "total"), [(4, 1, 4, 4), (2, 2, 4, 4), (1, 4, 4, 4), (1, 4, 2, 2)]
)
def test_heads_before_tp(held, tp, model, total):
    assert translate.total_heads(held, tp, model) == total


def test_layers_of_windows_may_have_other_heads_than_the_model_says():
    assert translate.total_heads(8, 2, 4) == 16


def test_layers_come_in_the_models_order_whatever_the_groups_order():
    names = ["m.layers.10.attn", "m.layers.2.attn"]
    found = geometry(
        (names, FullAttentionSpec()), (["m.layers.3.attn"], SlidingWindowSpec(num_kv_heads=4))
    )
    assert list(found.layers) == ["m.layers.2.attn", "m.layers.3.attn", "m.layers.10.attn"]
    assert [group.name for group in found.groups] == ["group-0", "group-1"]
    assert found.groups[0].layer_names == ("m.layers.2.attn", "m.layers.10.attn")


def test_a_uniform_group_has_a_spec_for_each_layer():
    specs = {"a.0": FullAttentionSpec(), "a.1": FullAttentionSpec(head_size=128, head_size_v=128)}
    found = geometry((list(specs), UniformTypeKVCacheSpecs(specs)))
    assert [spec.head_size for spec in found.layers.values()] == [64, 128]


def test_every_layer_that_cannot_be_translated_has_its_reason():
    with pytest.raises(kvpolicy.CertificationError) as refused:
        geometry((["a.0"], MambaSpec()), (["a.1"], SinkFullAttentionSpec()), (["a.2"], latent()))
    assert set(refused.value.refusals) == {"a.0", "a.1"}
    assert "2 of 3 layers" in str(refused.value)
    assert "MambaSpec" in str(refused.value)


def test_stages_of_a_pipeline_follow_one_another():
    window, full = SlidingWindowSpec(), FullAttentionSpec()
    first = stage((["a.0", "a.2"], full), (["a.1"], window))
    found = translate.geometry([first, stage((["a.4"], full), (["a.3"], window))], num_blocks=8)
    assert list(found.layers) == ["a.0", "a.1", "a.2", "a.3", "a.4"]
    assert found.stages == (3, 2)
    assert [group.layer_names for group in found.groups] == [("a.0", "a.2", "a.4"), ("a.1", "a.3")]
    with pytest.raises(VLLMConfigError, match="pipeline stage 1 has no layer"):
        translate.geometry([first, stage(([], full), ([], window))], num_blocks=8)


def test_kernel_blocks_are_told_by_the_tensors():
    config = cache((["a.0", "a.1", "a.2"], FullAttentionSpec()))
    tensors = {
        "a.0": SimpleNamespace(shape=(32, 2, 32, 128)),
        "a.1": SimpleNamespace(shape=(8, 2, 128, 128)),
    }
    assert translate.kernel_blocks(config, [0], tensors) == {"a.0": 32}


def test_a_context_says_what_the_engine_said():
    found = context(canonical=True, options={"plugins": ["slab"]}, rank=1)
    assert (found.grid.tp, found.rank, found.canonical) == (2, 1, True)
    assert found.dtype == "bfloat16"
    assert found.options["kvpolicy"] == {"plugins": ["slab"]}
    assert found.backend.layouts == {kvpolicy.KVCacheLayout.LBHNC}


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"), [("auto", "bfloat16"), ("fp8", "float8_e4m3fn"), ("fp8_e5m2",) * 2]
)
def test_the_caches_own_dtype_goes_before_the_models(cache_dtype, dtype):
    expected = {"fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
    assert context(cache_dtype=cache_dtype).dtype == expected


def test_on_the_cpu_the_instruction_set_is_part_of_the_format():
    amx, vec = context(canonical=True), context(canonical=True, isa="vec")
    assert (amx.encoding, vec.encoding) == ("cpu-amx", "cpu-vec")
    ids = {kvpolicy.Connector(one, plugins=[]).format_id for one in (amx, vec)}
    assert len(ids) == 2
    assert context(backend=ANY).encoding == ""


def test_a_backend_takes_the_layouts_that_it_declares():
    two = Backend(name="X", platform="cuda", layouts=("LBHNC", "BLHNC"))
    for backend, obstacle in (
        (CPU, "the backend does not take BLHNC"),
        (two, None),
        (ANY, None),
    ):
        assert kvpolicy.slab_obstacle(context(backend=backend)) == obstacle


@pytest.mark.parametrize(
    ("resolved", "obstacle"),
    [("BLHNC", None), ("BHLNC", None), ("HND", "the backend does not take BLHNC")],
)
def test_what_the_engine_resolves_against_the_wish_is_all_that_it_takes(resolved, obstacle):
    found = context(backend=ANY, layout=resolved, is_as_asked=False)
    assert kvpolicy.slab_obstacle(found) == obstacle
    assert kvpolicy.slab_obstacle(context(backend=ANY, layout=resolved)) is None
    assert found.layout is kvpolicy.KVCacheLayout.parse(resolved)


def test_latents_on_the_cpu_keep_to_the_one_layout_that_their_kernels_take():
    cached = geometry((["a.0"], latent()), heads=1)
    backend = Backend(name="CPU_MLA", platform="cpu")
    assert kvpolicy.slab_obstacle(context(cached, backend)) == "the backend is not stride-aware"
    assert context(cached, backend).encoding == "cpu"


def test_the_order_asked_for_is_hnd_unless_only_nhd_is_taken():
    nhd = Backend(name="X", platform="cuda", layouts=("LBNHC", "BLNHC"), nhd=True)
    assert context(backend=nhd).layout is kvpolicy.KVCacheLayout.LBNHC
    for backend in (CPU, ANY):
        assert context(backend=backend).layout is kvpolicy.KVCacheLayout.LBHNC


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"canonical": "true"}, "canonical_layout is true or false, not 'true'"),
        ({"options": ["slab"]}, "is a mapping of options, not"),
        ({"canonical_layuot": True}, "no 'canonical_layuot'; did you mean 'canonical_layout'"),
        ({"pool_file": 5}, "pool_file is the path of a file, not 5"),
        ({"pool_file": ""}, "pool_file is the path of a file, not ''"),
        ({"decode_context_parallel_size": 2}, "context parallelism on the CPU"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_by_name(changes, words):
    with pytest.raises(VLLMConfigError, match=words):
        context(**changes)
