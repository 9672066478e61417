"""An explanation as a tree: who decided, who was outvoted and why, which layers are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from kvpolicy.cli.output import size
from kvpolicy.words import span_of


def in_words(explained: Mapping[str, Any]) -> str:
    """The decision as two sentences."""
    decision = explained["decision"]
    by = _decided(decision)
    what = "Cross-layer blocks" if decision["cross_layer_blocks"] else "Per-layer registration"
    layers = explained["layers"]
    portable = sum(layer["portable"] for layer in layers)
    if explained["canonical"]:
        kept = "" if portable == len(layers) else f"; {len(layers) - portable} are kept per rank"
        stored = f"{portable} of {len(layers)} layers are portable{kept}"
    else:
        stored = "Stored as it lies, one slice per rank; not portable"
    return f"{what} ({decision['layout']}), {by}. {stored}."


def _decided(decision: Mapping[str, Any]) -> str:
    who = decision["decided_by"]
    return f"decided by {who}" if who else "since nobody votes"


def _answer(answer: bool | None) -> str:
    return {True: "cross-layer", False: "per-layer", None: "abstains"}[answer]


def _outcome(vote: Mapping[str, Any], decision: Mapping[str, Any], decider: int | None) -> str:
    """What became of a vote."""
    if vote["answer"] is None:
        return ""
    if decision["layout"] is None:
        return "opposed at this priority" if vote["priority"] == decider else ""
    if vote["plugin"] == decision["decided_by"]:
        return "decides"
    if vote["answer"] == decision["cross_layer_blocks"]:
        return f"agrees with {decision['decided_by']}"
    return f"outvoted by {decision['decided_by']}: {decider} comes before {vote['priority']}"


def _votes(tree: Tree, explained: Mapping[str, Any]) -> None:
    decision = explained["decision"]
    deciders = {vote["plugin"]: vote["priority"] for vote in decision["votes"]}
    if decision["layout"] is None:  # the highest votes are opposite
        cast = (vote["priority"] for vote in decision["votes"] if vote["answer"] is not None)
        decider = max(cast)
    else:
        decider = deciders.get(decision["decided_by"])
    width = max((len(vote["plugin"]) for vote in decision["votes"]), default=0)
    digits = max((len(str(vote["priority"])) for vote in decision["votes"]), default=0)
    branch = tree.add("votes, the highest priority first")
    for vote in decision["votes"]:
        outcome = _outcome(vote, decision, decider)
        said = ", ".join(filter(None, (_answer(vote["answer"]), outcome)))
        reason = vote["reason"] or "no reason given"
        branch.add(
            escape(f"{vote['priority']:>{digits}} {vote['plugin']:<{width}} {said}\n{reason}")
        )


def _holds(spec: Mapping[str, Any]) -> str:
    """What one layer's cache holds."""
    if "state_bytes" in spec:
        return f"state of {spec['state_bytes']:,} B"
    if "row_bytes" in spec:
        return f"latent rows of {spec['row_bytes']:,} B"
    sizes = dict.fromkeys((spec["head_size"], spec["v_head_size"]))
    return f"{spec['total_kv_heads']} KV heads x {'/'.join(str(size) for size in sizes)}"


def _fragments(count: int) -> str:
    return "1 fragment" if count == 1 else f"{count:,} fragments"


def _together(names: Sequence[str]) -> str:
    """Layers that share a line."""
    return f"{span_of(names)}, {len(names):,} layer" + "s" * (len(names) != 1)


def _layers(tree: Tree, explained: Mapping[str, Any]) -> None:
    """The groups, and in each the layers of equal spec together."""
    branch = tree.add("layers")
    for group in explained["groups"]:
        portable = "portable" if group["portable"] else "not portable"
        node = branch.add(
            escape(
                f"group {group['name']}: a block's record on all ranks is "
                f"{size(group['record_bytes'])}, {_fragments(group['fragments_per_block'])}, "
                f"{portable}\nformat id {group['format_id']}"
            )
        )
        alike: dict[str, list[str]] = {}
        for layer in explained["layers"]:
            if layer["group"] != group["name"]:
                continue
            told = [f"page on a rank {size(layer['local_page_bytes'])}"]
            if explained["canonical"]:
                told.append(f"canonical {size(layer['canonical_page_bytes'])}")
            told.append(_fragments(layer["fragments_per_block"]))
            alike.setdefault(f"{_holds(layer['spec'])}, {', '.join(told)}", []).append(
                layer["name"]
            )
        for told_of, names in alike.items():
            node.add(escape(f"{_together(names)}\n{told_of}"))


def refused(explained: Mapping[str, Any], console: Console) -> None:
    """Prints what is known of a start-up that was refused: the votes, and each layer's reason."""
    decision = explained["decision"]
    if decision["layout"] is None:
        what = "no decision: opposite votes at one priority"
    else:
        what = f"{decision['layout']}, {_decided(decision)}"
    tree = Tree(f"[bold]Refused[/bold] ({escape(what)})")
    _votes(tree, explained)
    reasons: dict[tuple[str, str], list[str]] = {}
    for layer in explained.get("layers", ()):
        why = layer["refusal"] or {"code": "nothing against it", "detail": ""}
        reasons.setdefault((why["code"], why["detail"]), []).append(layer["name"])
    if reasons:
        branch = tree.add("layers")
    for (code, detail), names in reasons.items():
        branch.add(escape(f"{_together(names)}: {code}\n{detail}".rstrip()))
    console.print(tree)


def _facts(explained: Mapping[str, Any]) -> list[tuple[str, str]]:
    specs = [layer["spec"] for layer in explained["layers"]]
    packing = sorted({spec["kv_packing"] for spec in specs if "kv_packing" in spec})
    tokens = sorted({spec["block_size"] for spec in specs if "block_size" in spec})
    cache = [explained["dtype"] or "dtype unknown"]
    cache += [f"blocks of {count} tokens" for count in tokens]
    cache += [f"{name} K/V" for name in packing]
    cache += [f"encoding {explained['encoding']}"] if explained["encoding"] else []
    engine = explained["engine"]
    aware = "stride-aware" if engine["stride_aware"] else "not stride-aware"
    takes = "all layouts" if engine["layouts"] is None else ", ".join(engine["layouts"])
    return [
        ("cache", ", ".join(cache)),
        ("engine", f"simulated: {aware}, takes {takes}"),
        ("format id", explained["format_id"]),
        ("fingerprint", explained["fingerprint"]),
    ]


def people(explained: Mapping[str, Any], console: Console, picture: str = "") -> None:
    """Prints the explanation; ``picture`` is the file of its picture, "" if there is none."""
    tree = Tree(f"[bold]{escape(in_words(explained))}[/bold]")
    _votes(tree, explained)
    _layers(tree, explained)
    for name, value in _facts(explained):
        tree.add(f"{name:<12} {escape(value)}")
    for plugin in explained["plugins"]:
        if plugin["status"] == "active" and plugin["reason"]:
            tree.add(f"{'plugin':<12} {escape(plugin['name'])}: {escape(plugin['reason'])}")
    if picture:
        tree.add(f"{'picture':<12} {escape(picture)}")
    console.print(tree)
