"""The picture of a block: its bytes against the kit's oracle, its words in nobody's way."""

from __future__ import annotations

import json
import tempfile
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpolicy.cli import _parser, main
from kvpolicy.cli.draw import Picture, clipped, colour, text_width
from kvpolicy.cli.options import context_of
from kvpolicy.cli.scene import Fold, folded
from kvpolicy.specs import StateSpec
from kvpolicy.testing import oracle

MODELS = Path(__file__).parent / "models"
QWEN = MODELS / "qwen3-30b-a3b.json"
NAMESPACE = "{http://www.w3.org/2000/svg}"

DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "torch_dtype": "bfloat16",
}
LATENT = json.loads((MODELS / "deepseek-v3.json").read_text()) | {"num_hidden_layers": 3}
HYBRID = {
    "model_type": "bamba",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "dtype": "bfloat16",
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def drawn(config: dict, words: list[object]) -> tuple[ET.Element, object] | None:
    """The picture and the context that it shows; None where start-up is refused."""
    with tempfile.TemporaryDirectory() as where:
        path, picture = Path(where) / "config.json", Path(where) / "block.svg"
        path.write_text(json.dumps(config))
        line = ["explain", str(path), *(str(word) for word in words)]
        if main([*line, "--json", "--plugins", "", "--svg", str(picture)]):
            return None
        context = context_of(_parser().parse_args(line), config, 2)
        return ET.fromstring(picture.read_text("utf-8")), context


def rects(svg: ET.Element, kind: str, **wanted: str) -> list[dict[str, str]]:
    """The rectangles that have a kind of data, rows or runs."""
    found = [
        {name.removeprefix("data-"): value for name, value in rect.attrib.items()}
        for rect in svg.iter(f"{NAMESPACE}rect")
        if f"data-{kind}" in rect.attrib
    ]
    return [one for one in found if all(one[name] == value for name, value in wanted.items())]


def span(one: dict[str, str]) -> tuple[int, int]:
    return int(one["start"]), int(one["start"]) + int(one["bytes"])


# Bytes.


def some(**options: object) -> st.SearchStrategy[list[object]]:
    """Option lists, each option left out or given."""
    made = {
        name: st.none()
        | (values if isinstance(values, st.SearchStrategy) else st.sampled_from(values))
        for name, values in options.items()
    }

    def words(found: dict[str, object]) -> list[object]:
        return [
            word
            for name, value in found.items()
            if value is not None
            for word in ([f"--{name}"] if value is True else [f"--{name}", value])
        ]

    return st.fixed_dictionaries(made).map(words)


OPTIONS = some(
    tp=[1, 2, 4, 8],
    pp=[2],
    dcp=[2],
    pcp=[2],
    layout=["NHD"],
    canonical=st.just(True),
    **{
        "canonical-order": ["HND", "NHD"],
        "cp-interleave": [2, 4],
        "block-size": [4, 8, 96],
        "kernel-block-size": [4],
        "kv-packing": ["split"],
    },
)
CONFIGS = st.sampled_from([DENSE, DENSE | {"num_hidden_layers": 7}, LATENT, HYBRID])


def in_memory(context, name, place):
    """A rank's page as kernel blocks lie one after the other, from the oracle's own rows."""
    spec, mine = context.geometry.layers[name], oracle.held(context, name, place, 1)
    if isinstance(spec, StateSpec):
        return mine.reshape(-1)
    halves, heads, _, row = mine.shape
    split = mine.reshape(halves, heads, -1, spec.kernel_block_size, row).transpose(2, 0, 1, 3, 4)
    first = context.layout.value.index("H") < context.layout.value.index("N")
    return (split if first else split.swapaxes(2, 3)).reshape(-1)


@settings(max_examples=60)
@given(CONFIGS, OPTIONS)
def test_every_run_that_is_drawn_is_where_the_oracle_has_its_bytes(config, words):
    found = drawn(config, words)
    assume(found is not None)
    svg, context = found
    groups = {g.name: g for g in context.geometry.groups}
    names = {one["layer"] for one in rects(svg, "row")}
    (group,) = [g for g in groups.values() if names <= {*g.layer_names}]
    assert oracle.record_bytes(context, group) == max(
        oracle.record_bytes(context, g) for g in groups.values()
    )
    record = oracle.record(context, group, 1)
    places = oracle.places(context.grid)
    stored = {}
    for place in places:
        row = np.full_like(record, 0xFD)  # the oracle's sentinel, which no record has
        oracle.store_part(row, context, group, place, 0, 1)
        stored[place.rank] = row != 0xFD
    pages = {}
    for one in rects(svg, "run"):
        rank, name = int(one["rank"]), one["layer"]
        memory, at, size = (int(one[key]) for key in ("memory", "record", "size"))
        if (rank, name) not in pages:
            pages[rank, name] = in_memory(context, name, places[rank])
        page = pages[rank, name]
        assert np.array_equal(page[memory : memory + size], record[at : at + size])
        start, end = span(one)
        begins = at if one["side"] == "record" else memory
        assert begins <= start < end <= begins + size
        if one["side"] == "record":
            assert stored[rank][start:end].all()


@settings(max_examples=40)
@given(CONFIGS, OPTIONS)
def test_the_runs_of_a_row_tile_it_and_padding_has_none(config, words):
    found = drawn(config, words)
    assume(found is not None)
    svg, _ = found
    rows, runs = rects(svg, "row"), rects(svg, "run")
    assert rows
    for row in rows:
        inside = [
            span(run)
            for run in runs
            if run["y"] == row["y"]
            and (run["side"], run["layer"]) == (row["side"], row["layer"])
            and float(row["x"]) <= float(run["x"]) < float(row["x"]) + float(row["width"])
        ]
        if row["row"] == "padding":
            assert inside == []
            continue
        start, end = span(row)
        edges = sorted(inside)
        assert [a for a, _ in edges] == [start, *(b for _, b in edges[:-1])]
        assert edges[-1][1] == end


def test_the_runs_of_the_facts_are_drawn():
    """Block 4, 4 heads of 8, 2 B, TP 2, NHD: the four runs of rank 1 by hand."""
    config = DENSE | {"head_dim": 8, "num_hidden_layers": 1}
    words = ["--tp", 2, "--layout", "nhd", "--canonical", "--block-size", 4]
    svg, _ = drawn(config, words)
    runs = rects(svg, "run", side="record", rank="1")
    told = [tuple(int(run[key]) for key in ("memory", "record", "size")) for run in runs]
    assert told == [(0, 64, 64), (64, 192, 64), (128, 320, 64), (192, 448, 64)]
    assert [run["run"] for run in runs] == ["1", "2", "3", "4"]
    memory = rects(svg, "run", side="memory", rank="1")
    assert [tuple(int(run[key]) for key in ("memory", "record", "size")) for run in memory] == told
    assert len({run["fill"] for run in runs + memory}) == 1


def test_ranks_with_equal_bytes_are_told_and_one_of_them_is_in_the_record():
    svg, _ = drawn(LATENT, ["--tp", 2, "--canonical"])
    assert {run["rank"] for run in rects(svg, "run", side="record")} == {"0"}
    pale = {run["rank"] for run in rects(svg, "run") if "fill-opacity" in run}
    assert pale == {"1"}
    assert any(text.startswith("Pale: ") for text, *_ in words_of(svg))
    svg, _ = drawn(DENSE, ["--tp", 2, "--canonical"])
    assert not any(text.startswith("Pale: ") for text, *_ in words_of(svg))


# Words.


def words_of(svg: ET.Element) -> list[tuple[str, float, float, float, float]]:
    """Every text with the room that it takes: left, top, right, bottom."""
    found = []
    for text in svg.iter(f"{NAMESPACE}text"):
        size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
        width = len(text.text) * size * 0.61  # the widest of the common monospaced fonts
        left = x - width if text.attrib.get("text-anchor") == "end" else x
        found.append((text.text, left, y - 0.76 * size, left + width, y + 0.2 * size))
    return found


def meet(one, other, slack=0.3):
    return (
        one[0] < other[2] - slack
        and other[0] < one[2] - slack
        and one[1] < other[3] - slack
        and other[1] < one[3] - slack
    )


def check_room(svg: ET.Element) -> None:
    texts = words_of(svg)
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    for text, left, top, right, bottom in texts:
        assert left >= 0, text
        assert top >= 0, text
        assert right <= width, text
        assert bottom <= height, text
    for (a, *one), (b, *other) in combinations(texts, 2):
        assert not meet(one, other), f"{a!r} and {b!r} overlap"
    boxes = [
        (x, y, x + w, y + h)
        for rect in svg.iter(f"{NAMESPACE}rect")
        if "data-row" in rect.attrib
        for x, y, w, h in [[float(rect.attrib[n]) for n in ("x", "y", "width", "height")]]
    ]
    for text, *room in texts:
        for box in boxes:
            inside = box[0] <= room[0] and room[2] <= box[2] and text.isdigit()
            assert inside or not meet(room, box), f"{text!r} lies over a row"
    for one, other in combinations(boxes, 2):
        assert not meet(one, other), "two rows overlap"


@settings(max_examples=25)
@given(CONFIGS, OPTIONS)
def test_no_word_overlaps_another_or_a_row(config, words):
    found = drawn(config, words)
    assume(found is not None)
    check_room(found[0])


@pytest.mark.parametrize("model", sorted(path.name for path in MODELS.glob("*.json")))
@pytest.mark.parametrize("words", [["--canonical", "--tp", 8, "--layout", "nhd"], ["--tp", 2]])
def test_every_model_s_picture_has_room_and_is_no_poster(model, words):
    """However many layers, ranks, heads and tokens: the rest is folded, and told."""
    config = json.loads((MODELS / model).read_text())
    found = drawn(config, [*words, "--block-size", 256])
    if found is None:
        pytest.fail(f"{model} is refused")
    svg, context = found
    check_room(svg)
    assert float(svg.attrib["width"]) < 2000
    assert float(svg.attrib["height"]) < 4000
    hidden = [text for text, *_ in words_of(svg) if text.startswith("... ")]
    assert any(" layers: " in text for text in hidden)
    assert len(rects(svg, "row")) < 500
    del context


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", 16], "... ranks 6 to 14"),
        (["--tp", 8], ""),
        (["--block-size", 65536], "... 65,536 tokens"),
        (["--block-size", 64, "--layout", "nhd"], "... 57 more rows"),
    ],
)
def test_what_is_many_is_folded_and_told(words, said):
    svg, _ = drawn(json.loads(QWEN.read_text()), [*words, "--canonical"])
    texts = [text for text, *_ in words_of(svg)]
    assert "... 46 layers: model.layers.1-46.self_attn.attn" in texts
    assert said in texts if said else not any(text.startswith("... ranks") for text in texts)


@given(st.integers(0, 40), st.integers(0, 5), st.integers(0, 5))
def test_a_fold_hides_the_middle_and_never_a_single_thing(count, first, last):
    things = list(range(count))
    found = folded(things, (first, last))
    folds = [one for one in found if isinstance(one, Fold)]
    assert [x for one in found for x in (one.hidden if isinstance(one, Fold) else [one])] == things
    assert len(folds) <= 1
    assert all(len(fold.hidden) >= 2 for fold in folds)
    assert len(found) <= first + last + 1


# The drawing itself.


@given(st.text(), st.text())
def test_whatever_a_name_holds_the_picture_is_well_formed(text, hint):
    picture = Picture()
    picture.text(5, 20, text)
    picture.rect(0, 0, 5, 5, hint=hint, name=text)
    svg = ET.fromstring(picture.svg().encode("utf-8"))
    written = text.replace("\r", "\n")  # as XML reads line ends
    if text and all(" " <= char < "\ud800" for char in text):
        (found,) = svg.iter(f"{NAMESPACE}text")
        assert found.text == written


@given(st.text("abcdefghij", max_size=200), st.floats(0, 500))
def test_a_clipped_text_fits_and_keeps_both_ends(text, width):
    found = clipped(text, width)
    assert text_width(found) <= max(width, text_width("...")) + 1e-6
    assert found == text or (
        "..." in found
        and text.startswith(found.split("...")[0])
        and text.endswith(found.split("...")[1])
    )


def luminance(code: str) -> float:
    parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_differ_and_dark_words_are_read_on_them():
    first = [colour(i) for i in range(64)]
    assert len(set(first)) == len(first)
    ink = luminance("#222222")
    for code in first:
        assert (luminance(code) + 0.05) / (ink + 0.05) >= 4.5  # as the web's guidelines ask


# The command.


def test_the_picture_is_told_beside_the_words_and_the_json(tmp_path, capsys):
    picture = tmp_path / "block.svg"
    assert main(["explain", str(QWEN), "--svg", str(picture)]) == 0
    assert f"picture      {picture}" in capsys.readouterr().out.replace("\n", "")
    first = picture.read_bytes()
    assert main(["explain", str(QWEN), "--svg", str(picture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decision"]["decided_by"] == "cross-layer"
    assert picture.read_bytes() == first  # the same every time


def test_a_picture_that_cannot_be_written_is_status_2(tmp_path, capsys):
    where = tmp_path / "nowhere" / "block.svg"
    assert main(["explain", str(QWEN), "--svg", str(where)]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"kvpolicy: cannot write '{where}': No such file or directory\n"
    assert captured.out == ""


def test_what_is_refused_draws_nothing(tmp_path, capsys):
    picture = tmp_path / "block.svg"
    assert main(["explain", str(QWEN), "--tp", "3", "--svg", str(picture)]) == 3
    assert not picture.exists()
    assert "heads-not-divisible" in capsys.readouterr().err
