"""Resets, and requests that end while their blocks are on the way."""

from __future__ import annotations

from harness import BLOCK, LONG, NEEDS_VLLM, SHORT, assert_same, connector, run

pytestmark = NEEDS_VLLM

IDLE = dict.fromkeys(["scheduler jobs", "requests", "worker jobs", "loads", "blocks in use"], 0)


def test_nothing_is_left_of_a_request_that_ended_in_a_delayed_transfer(models, plain, outside):
    """Once its chunks stay, once all caches are reset while the transfer is still held."""
    then = [["generate", LONG], ["generate", SHORT], ["idle"]]
    steps = [
        *(["generate", LONG], ["generate", SHORT], ["reset"], ["generate", SHORT], ["idle"]),
        *(["abort", LONG, "load", False], *then, ["reset"]),
        *(["abort", LONG, "load", True], *then, ["reset", True]),
        *(["abort", LONG, "store", False], *then, ["reset", True]),
        *(["abort", LONG, "store", True], *then, ["reset"]),
        *(["generate", LONG], ["idle"], ["reset", True], ["generate", LONG]),
    ]
    config = connector(canonical_layout=True, kvpolicy={"plugins": ["acme-engine"]})
    results, log = run(models, steps, config, path=outside)
    assert results[4] == IDLE  # so what is counted does end
    for place, (direction, all_reset) in enumerate(
        [("load", False), ("load", True), ("store", False), ("store", True)]
    ):
        aborted, long, short, idle, _ = results[5 + 5 * place : 10 + 5 * place]
        assert direction in aborted["held"]
        assert_same(long + short, plain["long"] + plain["short"])
        assert long[0]["cached"] == (0 if all_reset else 4 * BLOCK)
        assert idle == IDLE

    again, idle, emptied, last = results[-4:]
    assert_same(again + last, plain["long"] * 2)
    assert again[0]["cached"] == 4 * BLOCK
    assert emptied is True
    assert last[0]["cached"] == 0
    assert idle == IDLE
    assert "kvpolicy: load of job" not in log
    assert "kvpolicy: store of job" not in log
