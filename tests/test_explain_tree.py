"""What `explain` says to people: who decided, who was outvoted and why, which layers are alike."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvpolicy.cli import main
from kvpolicy.cli.tree import people, refused
from kvpolicy.decision import CastVote, decide
from kvpolicy.errors import PolicyConflictError
from kvpolicy.explain import explain_decision
from kvpolicy.layout import KVCacheLayout

MODELS = Path(__file__).parent / "models"
QWEN = MODELS / "qwen3-30b-a3b.json"


def tree_of(capsys, *words: object) -> str:
    capsys.readouterr()
    assert main(["explain", *(str(word) for word in words), "--plugins", ""]) == 0
    return capsys.readouterr().out


def branch(text: str, start: str) -> list[str]:
    """The lines below a branch of the tree, its own further lines first, without guides."""
    cut = [(line.lstrip("│├└─ ").rstrip(), line) for line in text.splitlines()]
    guides = [line[: len(line) - len(line.lstrip("│├└─ "))] for _, line in cut]
    (at,) = [i for i, (words, _) in enumerate(cut) if words.startswith(start)]
    below = []
    for (words, _), guide in zip(cut[at + 1 :], guides[at + 1 :], strict=True):
        if ("├" in guide or "└" in guide) and len(guide) <= len(guides[at]):
            break
        below.append(words)
    return below


def test_the_votes_say_who_decides_and_who_is_outvoted_and_why(capsys):
    out = tree_of(capsys, QWEN, "--tp", 2, "--canonical")
    assert out.startswith("Per-layer registration (LBHNC), decided by canonical. 48 of 48 layers")
    votes = branch(out, "votes")
    assert votes[0] == "100 canonical   per-layer, decides"
    assert " ".join(votes[1:-2]) == (
        "canonical is requested, and every layer's page is certified by itself; a cross-layer slab "
        "offers no per-layer reference"
    )
    assert votes[-2] == "50 cross-layer cross-layer, outvoted by canonical: 100 comes before 50"
    assert votes[-1] == "one group of equal pages and a stride-aware backend"


def test_an_abstention_says_why(capsys):
    out = tree_of(capsys, QWEN, "--no-stride-aware")
    assert out.startswith("Per-layer registration (LBHNC), since nobody votes. Stored as it lies")
    votes = branch(out, "votes")
    assert votes[:2] == ["100 canonical   abstains", "canonical is not requested"]
    assert votes[2] == "50 cross-layer abstains"
    assert "not stride-aware" in votes[3]


def refusal_of(capsys, *words: object) -> str:
    capsys.readouterr()
    assert main(["explain", *(str(word) for word in words), "--plugins", ""]) == 3
    return capsys.readouterr().out


def test_a_refusal_shows_the_votes_and_what_stands_against_each_layer(capsys):
    out = refusal_of(capsys, QWEN, "--canonical", "--priority", "cross-layer=200")
    assert out.startswith("Refused (BLHNC, decided by cross-layer)\n")
    votes = branch(out, "votes")
    assert votes[0] == "200 cross-layer cross-layer, decides"
    assert votes[2] == "100 canonical   per-layer, outvoted by cross-layer: 200 comes before 100"
    layers = branch(out, "layers")
    assert layers[0] == "model.layers.0-47.self_attn.attn, 48 layers: uncertified"
    assert layers[1].startswith("no policy takes canonical pages in BLHNC, which cross-layer")


def test_a_refusal_without_a_decision_shows_which_votes_are_opposite(capsys):
    out = refusal_of(capsys, QWEN, "--canonical", "--priority", "cross-layer=100")
    assert out.startswith("Refused (no decision: opposite votes at one priority)\n")
    votes = branch(out, "votes")
    assert votes[0] == "100 canonical   per-layer, opposed at this priority"
    assert votes[-2] == "100 cross-layer cross-layer, opposed at this priority"
    assert "layers\n" not in out


def test_layers_that_are_fine_are_told_from_those_that_are_not(capsys):
    assert main(["explain", str(QWEN), "--plugins", "", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    for layer in explained["layers"][40:]:
        layer["refusal"] = {"code": "uncertified", "detail": "nobody [knows] why"}
    stream = io.StringIO()
    refused(explained, Console(file=stream, width=120))
    assert branch(stream.getvalue(), "layers") == [
        "model.layers.0-39.self_attn.attn, 40 layers: nothing against it",
        "model.layers.40-47.self_attn.attn, 8 layers: uncertified",
        "nobody [knows] why",
    ]


def test_the_encoding_is_shown(capsys):
    assert "bfloat16, blocks of 16 tokens, packed K/V, encoding e1" in tree_of(
        capsys, QWEN, "--encoding", "e1"
    )


def test_what_an_active_plugin_says_of_itself_is_shown(capsys):
    assert main(["explain", str(QWEN), "--plugins", "", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert [plugin["reason"] for plugin in explained["plugins"]] == [""] * 4
    explained["plugins"][3]["reason"] = "no [fast] path here"
    stream = io.StringIO()
    people(explained, Console(file=stream, width=120))
    assert "plugin       host-copy: no [fast] path here\n" in stream.getvalue()


def test_layers_of_equal_spec_share_a_line_and_the_groups_say_what_a_record_is(capsys):
    out = tree_of(capsys, MODELS / "gemma-3-27b.json", "--block-size", 32)
    page = 16 * 32 * 2 * 128 * 2
    sliding = branch(out, "group sliding")
    assert sliding[0].startswith("format id ")
    assert sliding[1:] == [
        "model.layers.0-4,6-10,12-16,...,60-61.self_attn.attn, 52 layers",
        f"16 KV heads x 128, page on a rank {page:,} B, 1 fragment",
    ]
    assert (
        f"group sliding: a block's record on all ranks is {52 * page:,} B, 52 fragments, not "
        "portable" in out
    )
    assert "cache        bfloat16, blocks of 32 tokens, packed K/V" in out
    assert "engine       simulated: stride-aware, takes all layouts" in out


def test_a_latent_says_its_rows_and_its_canonical_page(capsys):
    out = tree_of(capsys, MODELS / "deepseek-v3.json", "--canonical")
    page = f"{16 * 1152:,} B"
    assert branch(out, "group latent")[1:] == [
        "model.layers.0-60.self_attn.attn, 61 layers",
        f"latent rows of 1,152 B, page on a rank {page}, canonical {page}, 1 fragment",
    ]
    assert f"is {61 * 16 * 1152:,} B, 61 fragments, portable" in out


@pytest.mark.parametrize("model", sorted(path.name for path in MODELS.glob("*.json")))
def test_every_layer_is_on_one_line_of_its_group(capsys, model):
    """The counts of the lines are those of the groups, whatever the model."""
    words = (MODELS / model, "--tp", 2, "--canonical")
    out = tree_of(capsys, *words)
    assert main(["explain", *(str(word) for word in words), "--plugins", "", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    for group in explained["groups"]:
        below = branch(out, f"group {group['name']}:")
        assert below[0] == f"format id {group['format_id']}"
        counts = [line.rsplit(", ", 1)[1].split()[0] for line in below[1::2]]
        assert sum(int(count.replace(",", "")) for count in counts) == len(group["layers"])


def test_a_long_name_and_a_narrow_terminal_lose_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = tree_of(capsys, QWEN, "--canonical")
    assert max(len(line) for line in out.splitlines()) <= 120
    assert "outvoted by canonical: 100 comes before 50" in out


VOTES = st.lists(
    st.tuples(st.sampled_from([True, False, None]), st.integers(-2, 2)), max_size=6
).map(
    lambda votes: [
        CastVote(plugin=f"p{i}", priority=priority, answer=answer, reason="[b]why[/b]")
        for i, (answer, priority) in enumerate(votes)
    ]
)


@given(VOTES)
def test_what_is_said_of_each_vote_follows_from_the_rule(votes):
    """The rule again, in other words: the loudest who votes wins, all who differ are outvoted."""
    try:
        decision = decide(votes, KVCacheLayout.LBHNC)
    except PolicyConflictError:
        return
    explained = {
        "canonical": False,
        "decision": explain_decision(decision),
        "layers": [],
        "plugins": [],
        "groups": [],
        "dtype": "",
        "encoding": "",
        "engine": {"stride_aware": True, "layouts": None},
        "format_id": "f",
        "fingerprint": "g",
    }
    said = io.StringIO()
    people(explained, Console(file=said, width=200, highlight=False))
    lines = branch(said.getvalue(), "votes")
    assert len(lines) == 2 * len(votes)
    assert lines[1::2] == ["[b]why[/b]"] * len(votes)
    heard = [vote for vote in votes if vote.answer is not None]
    loudest = max((vote.priority for vote in heard), default=None)
    told = {line.split()[1]: line.split(maxsplit=2)[2] for line in lines[::2]}
    order = sorted(votes, key=lambda vote: (-vote.priority, vote.plugin))
    assert list(told) == [vote.plugin for vote in order]
    decider = next((v for v in order if v.answer is not None), None)
    for vote in votes:
        words = told[vote.plugin]
        if vote.answer is None:
            assert words == "abstains"
        elif vote is decider:
            assert words == f"{'cross-layer' if vote.answer else 'per-layer'}, decides"
        elif vote.answer is decider.answer:
            assert words.endswith(f", agrees with {decider.plugin}")
        else:
            why = f"outvoted by {decider.plugin}: {loudest} comes before {vote.priority}"
            assert words.endswith(f", {why}")


def test_an_ascii_terminal_gets_an_ascii_tree():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    explained = {
        "canonical": False,
        "decision": {
            "cross_layer_blocks": False,
            "layout": "LBHNC",
            "decided_by": None,
            "votes": [],
        },
        "layers": [],
        "plugins": [],
        "groups": [],
        "dtype": "",
        "encoding": "",
        "engine": {"stride_aware": True, "layouts": None},
        "format_id": "f",
        "fingerprint": "g",
    }
    people(explained, Console(file=stream, width=120))
    stream.flush()
    assert b"+-- votes" in stream.buffer.getvalue()
