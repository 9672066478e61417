"""The planner's choices as a table."""

from __future__ import annotations

import pytest
from kvpolicy_cuda.planner import Choice, Facts, Limits, Path, choose

KIB = 1024
MEASURED = Limits(store=32 * KIB, load=128 * KIB, measured="a device")
NOT_PINNED, NO_KERNEL, NO_STAGING, NO_MAPPING = (
    {"not_pinned": "the rows are not pinned"},
    {"no_kernel": "no triton"},
    {"no_staging": "no memory"},
    {"no_mapping": "other addresses"},
)

# what it is, fragment, run of the row, runs, against, limits -> path, what the reason says
TABLE = [
    ("slab", 1536 * KIB, 1536 * KIB, 512, {}, Limits(), Path.DMA, "are large"),
    ("pages of 64 KiB", 64 * KIB, 3072 * KIB, 9_999, {}, Limits(), Path.DMA, "from 65,536 B on"),
    ("pages of 32 KiB", 32 * KIB, 1536 * KIB, 9_999, {}, Limits(), Path.STAGED, "1,572,864 B in"),
    ("the same, measured", 32 * KIB, 1536 * KIB, 9_999, {}, MEASURED, Path.DMA, "are large"),
    ("pages of 4 KiB", 4 * KIB, 192 * KIB, 9_999, {}, Limits(), Path.STAGED, "4,096 B make runs"),
    ("canonical HND, TP2", 16 * KIB, 16 * KIB, 9_999, {}, Limits(), Path.DIRECT, "are small"),
    ("canonical NHD, TP2", 1 * KIB, 1 * KIB, 49_152, {}, Limits(), Path.DIRECT, "1,024 B are"),
    ("few runs", 1 * KIB, 1 * KIB, 64, {}, Limits(), Path.DMA, "64 runs are few"),
    ("not pinned", 1 * KIB, 1 * KIB, 9_999, NOT_PINNED, Limits(), Path.DMA, "not pinned"),
    ("no kernel", 1 * KIB, 1 * KIB, 9_999, NO_KERNEL, Limits(), Path.DMA, "no kernel: no triton"),
    ("no buffer", 4 * KIB, 192 * KIB, 9_999, NO_STAGING, Limits(), Path.DIRECT, "not staged: no"),
    ("no mapping", 1 * KIB, 1 * KIB, 9_999, NO_MAPPING, Limits(), Path.DMA, "not direct: other"),
    (
        "no mapping, long rows",
        4 * KIB,
        192 * KIB,
        9_999,
        NO_MAPPING,
        Limits(),
        Path.STAGED,
        "in the row",
    ),
    (
        "neither",
        4 * KIB,
        192 * KIB,
        9_999,
        {**NO_STAGING, **NO_MAPPING},
        Limits(),
        Path.DMA,
        "not staged: no memory; not direct: other addresses",
    ),
]


@pytest.mark.parametrize(
    ("fragment", "row", "runs", "against", "limits", "path", "reason"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_the_path_and_its_reason(fragment, row, runs, against, limits, path, reason):
    facts = Facts(to_host=True, runs=runs, fragment_bytes=fragment, host_run_bytes=row, **against)
    choice = choose(facts, limits)
    assert isinstance(choice, Choice)
    assert choice.path is path
    assert reason in choice.reason


def test_either_direction_has_its_own_limit():
    facts = {"runs": 9_999, "fragment_bytes": 64 * KIB, "host_run_bytes": 64 * KIB}
    assert choose(Facts(to_host=True, **facts), MEASURED).path is Path.DMA
    assert choose(Facts(to_host=False, **facts), MEASURED).path is Path.DIRECT
