"""What a policy may look at, and what a context refuses."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.context import BackendCapabilities, PolicyContext
from kvpolicy.errors import GeometryError, LayoutError, OptionError
from kvpolicy.geometry import CacheGeometry
from kvpolicy.grid import ParallelGrid
from kvpolicy.layout import KVCacheLayout
from kvpolicy.specs import LatentSpec

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
SPEC = LatentSpec(block_size=4, row_bytes=8)


def geometry(number=44, **more):
    return CacheGeometry(layers={f"layer.{n}": SPEC for n in range(number)}, num_blocks=2, **more)


def context(**changes):
    return PolicyContext(**{"geometry": geometry(), **changes})


def test_what_is_not_said():
    plain = context()
    assert plain.grid == ParallelGrid()
    assert (plain.rank, plain.canonical, plain.canonical_order) == (0, False, None)
    assert plain.layout is HND
    assert plain.backend == BackendCapabilities(name="", stride_aware=None, layouts=None)
    assert (plain.dtype, plain.encoding, dict(plain.options)) == ("", "", {})


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, HND),
        ({"layout": "nhd"}, NHD),
        ({"layout": "BLNHC"}, NHD),
        ({"canonical": True}, HND),
        ({"canonical": True, "layout": "nhd"}, NHD),
        ({"canonical": True, "layout": "nhd", "canonical_order": "hnd"}, HND),
        ({"canonical": True, "canonical_order": "nhd"}, NHD),
        ({"canonical": False, "canonical_order": "nhd"}, HND),  # means nothing without canonical
    ],
)
def test_the_order_of_stored_pages(changes, order):
    assert context(**changes).order is order


@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", " torch.bfloat16 "])
def test_a_dtype_has_one_name(value):
    assert context(dtype=value).dtype == "bfloat16"


@pytest.mark.parametrize("grid", [{"tp": 2, "pp": 2}, {"pp": 2}, {"pp": 2, "pcp": 3}])
def test_c19_a_rank_holds_the_layers_of_its_stage_by_name(grid):
    """Stages of 21 and 23 layers."""
    grid = ParallelGrid(**grid)
    staged = geometry(stages=[21, 23])
    for rank in grid.ranks():
        held = list(context(geometry=staged, grid=grid, rank=rank.rank).stage_layers)
        assert held == [f"layer.{n}" for n in (range(21) if rank.pp_rank == 0 else range(21, 44))]


@given(st.integers(1, 60), st.integers(1, 8))
def test_stages_partition_the_layers_in_order(number, pp):
    if pp > number:
        with pytest.raises(GeometryError, match="cannot fill"):
            context(geometry=geometry(number), grid=ParallelGrid(pp=pp))
        return
    here = context(geometry=geometry(number), grid=ParallelGrid(pp=pp))
    dealt = [name for stage in range(pp) for name in here.stages[stage]]
    assert dealt == list(here.geometry.layers)


def test_options_are_kept_apart_from_the_caller_s():
    options = {"kvpolicy": {"strict": True}}
    here = context(options=options)
    options.clear()
    assert here.options == {"kvpolicy": {"strict": True}}
    with pytest.raises(TypeError):
        here.options["x"] = 1


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"geometry": None}, GeometryError, "a PolicyContext takes a CacheGeometry, not NoneType"),
        ({"geometry": {}}, GeometryError, "takes a CacheGeometry, not dict"),
        ({"grid": 2}, GeometryError, "takes a ParallelGrid, not int"),
        ({"backend": "flash"}, GeometryError, "takes a BackendCapabilities, not str"),
        ({"rank": 1}, GeometryError, "rank 1 is not one of this grid's 1 ranks"),
        ({"rank": -1}, GeometryError, "rank -1 is not one of"),
        ({"rank": True}, GeometryError, "rank True is not one of"),
        ({"rank": "0"}, GeometryError, "rank '0' is not one of"),
        ({"grid": ParallelGrid(pp=45)}, GeometryError, "44 layers cannot fill 45 pipeline stages"),
        (
            {"geometry": geometry(stages=[21, 23]), "grid": ParallelGrid(pp=4)},
            GeometryError,
            "2 stages are given for pp=4",
        ),
        ({"canonical": 1}, OptionError, "PolicyContext.canonical is True or False, not 1"),
        ({"canonical": None}, OptionError, "PolicyContext.canonical is True or False, not None"),
        ({"layout": "XYZ"}, LayoutError, "no KV cache layout 'XYZ'"),
        ({"layout": None}, LayoutError, "a layout is given by name, not as NoneType"),
        ({"canonical_order": "nhdx"}, LayoutError, "did you mean 'NHD' or 'HND'?"),
        ({"canonical_order": "BLHNC", "canonical": True}, LayoutError, "LBNHC (NHD), not BLHNC"),
        ({"canonical_order": "BLHNC"}, LayoutError, "a canonical order is LBHNC (HND) or"),
        ({"dtype": None}, OptionError, "given by name, not NoneType None"),
        ({"dtype": 2}, OptionError, "dtype, encoding and a backend are given by name, not int 2"),
        ({"encoding": b"x"}, OptionError, "given by name, not bytes b'x'"),
        ({"options": None}, OptionError, "options is a mapping, not NoneType"),
        ({"options": ["kvpolicy"]}, OptionError, "options is a mapping, not list"),
    ],
)
def test_what_cannot_be_is_refused_in_words(changes, error, sentence):
    with pytest.raises(error) as refused:
        context(**changes)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"stride_aware": 1}, OptionError, "stride_aware is True, False or None, not 1"),
        ({"stride_aware": "yes"}, OptionError, "stride_aware is True, False or None, not 'yes'"),
        ({"layouts": ["HND", "XYZ"]}, LayoutError, "no KV cache layout 'XYZ'"),
        ({"layouts": [3]}, LayoutError, "a layout is given by name, not as int 3"),
        ({"layouts": 3}, OptionError, "layouts is a set of layouts or None, not 3"),
        ({"name": 3}, OptionError, "a backend are given by name, not int 3"),
    ],
)
def test_capabilities_that_cannot_be_are_refused(changes, error, sentence):
    with pytest.raises(error) as refused:
        BackendCapabilities(**changes)
    assert sentence in str(refused.value)


def test_c3_unknown_capabilities_stay_unknown():
    assert BackendCapabilities().stride_aware is None
    assert BackendCapabilities().layouts is None
    assert BackendCapabilities(layouts=[]).layouts == frozenset()


def test_a_context_crosses_process_boundaries_and_can_be_copied():
    here = context(
        geometry=geometry(1, stages=[1]),
        options={"kvpolicy": {"plugins": ["a"]}},
        backend=BackendCapabilities(layouts=["HND"]),
    )
    for there in (pickle.loads(pickle.dumps(here)), copy.deepcopy(here)):
        assert there == here
        assert hash(there) == hash(here)
        with pytest.raises(TypeError):
            there.geometry.layers["b"] = SPEC
