"""Options that commands share, and the context that they describe."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from kvpolicy.context import BackendCapabilities, PolicyContext
from kvpolicy.errors import GeometryError, OptionError
from kvpolicy.grid import ParallelGrid
from kvpolicy.layout import KVCacheLayout
from kvpolicy.models import dtype_from_config, geometry_from_config
from kvpolicy.plugins import PluginSet, load_plugins, parse_priorities, select

_GRID = {
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "dcp": "decode context parallel size",
    "pcp": "prefill context parallel size",
    "cp-interleave": "tokens of a context-parallel chunk",
}


# How a message names a value that an option gave.
_FIELD = re.compile(
    rf"ParallelGrid\.({'|'.join(name.replace('-', '_') for name in _GRID)})\b"
    r"|(?:Attention|Latent)Spec\.((?:kernel_)?block_size)\b"
)


def add_plugin_options(parser: argparse.ArgumentParser) -> None:
    """--plugins, --priority, --strict, --json."""
    group = parser.add_argument_group("plugins and output")
    group.add_argument(
        "--plugins", metavar="A,B", help="installed plugins that join the built-ins; '' for none"
    )
    group.add_argument(
        "--priority", metavar="NAME=N", action="append", default=[], help="may be repeated"
    )
    group.add_argument("--strict", action="store_true", help="any plugin fault is an error")
    group.add_argument("--json", action="store_true", help="one JSON object on standard output")


def add_model_options(parser: argparse.ArgumentParser, *, config_needed: bool = True) -> None:
    """The model, the grid, the cache and the engine."""
    parser.add_argument(
        "config",
        metavar="CONFIG.json",
        nargs=None if config_needed else "?",
        help="a model's Hugging Face config.json",
    )
    grid = parser.add_argument_group("grid")
    for name, text in _GRID.items():
        grid.add_argument(f"--{name}", type=int, default=None, metavar="N", help=f"{text} (1)")
    grid.add_argument("--pp-layers", metavar="A,B", help="layers per stage, as in 21,23")
    cache = parser.add_argument_group("cache")
    cache.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens (16)")
    cache.add_argument("--kernel-block-size", type=int, metavar="N", help="tokens (block size)")
    cache.add_argument("--dtype", help="of the cache; the config's by default")
    cache.add_argument("--encoding", default="", help="how elements encode numbers, by name")
    cache.add_argument("--kv-packing", default="packed", help="packed or split (packed)")
    cache.add_argument("--layout", default="HND", help="head/token order: HND or NHD (HND)")
    cache.add_argument("--canonical", action="store_true", help="stored bytes free of topology")
    cache.add_argument("--canonical-order", help="HND or NHD (the engine's order)")
    engine = parser.add_argument_group("engine (simulated: stride-aware, takes all layouts)")
    engine.add_argument("--no-stride-aware", action="store_true", help="a backend that is not")
    engine.add_argument("--backend-layouts", metavar="A,B", help="layouts that it takes (all)")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """The loading side, where it differs from the storing one."""
    load = parser.add_argument_group("loading side (the storing side's values by default)")
    for name, text in _GRID.items():
        load.add_argument(f"--load-{name}", type=int, metavar="N", help=text)
    load.add_argument("--load-pp-layers", metavar="A,B", help="layers per stage")
    load.add_argument("--load-block-size", type=int, metavar="N", help="tokens")
    load.add_argument("--load-kernel-block-size", type=int, metavar="N", help="tokens")
    load.add_argument("--load-layout", help="head/token order")


def plugins_of(args: argparse.Namespace) -> PluginSet:
    """The plugins that the options, the environment and the installation come to."""
    priorities: dict[str, int] = {}
    for item in args.priority:
        priorities |= parse_priorities(item, "--priority")
    strict = args.strict or None
    return load_plugins(
        select(names=args.plugins, priorities=priorities, strict=strict, source="--plugins")
    )


def _stages(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{option} is layers per stage, as in 21,23; found {text!r}") from None


def _layouts(text: str | None) -> list[KVCacheLayout] | None:
    if text is None:
        return None
    return [KVCacheLayout.parse(name) for name in text.split(",") if name.strip()]


def _side(args: argparse.Namespace, loading: bool) -> dict[str, Any]:
    """The values of one side; the loading side falls back to the storing one."""
    values = dict(vars(args))
    if loading:
        given = {k[len("load_") :]: v for k, v in values.items() if k.startswith("load_")}
        values |= {name: value for name, value in given.items() if value is not None}
        if given.get("pp") is not None and given.get("pp_layers") is None:
            values["pp_layers"] = None  # the storing side's stages are not the loading side's
        if given.get("pp_layers") is not None and given.get("pp") is None:
            values["pp"] = None
        if given.get("block_size") is not None and given.get("kernel_block_size") is None:
            values["kernel_block_size"] = None
    return values


def _in_options(error: GeometryError, given: Mapping[str, Any], loading: bool) -> GeometryError:
    """The error with options in place of the fields that they fill."""

    def option(found: re.Match[str]) -> str:
        field = found[1] or found[2]
        load = loading and given.get(f"load_{field}") is not None
        return f"--{'load-' if load else ''}{field.replace('_', '-')}"

    text = _FIELD.sub(option, str(error))
    if loading and "--load-" not in text:
        text += (
            " (the loading side, which has the storing side's values where no --load-tp, "
            "--load-dcp ... is given)"
        )
    return GeometryError(text)


def context_of(
    args: argparse.Namespace, config: Mapping[str, Any], num_blocks: int, *, loading: bool = False
) -> PolicyContext:
    """The context that the options describe, for rank 0.

    Raises:
        KVPolicyError: what they describe cannot be; names the option.
    """
    try:
        return _context(args, _side(args, loading), config, num_blocks, loading)
    except GeometryError as error:
        raise _in_options(error, vars(args), loading) from None


def _context(
    args: argparse.Namespace,
    side: Mapping[str, Any],
    config: Mapping[str, Any],
    num_blocks: int,
    loading: bool,
) -> PolicyContext:
    stages = _stages(side["pp_layers"], "--load-pp-layers" if loading else "--pp-layers")
    grid = {name.replace("-", "_"): side[name.replace("-", "_")] for name in _GRID}
    if grid["pp"] is None and stages is not None:
        grid["pp"] = len(stages)
    parallel = ParallelGrid(**{name: 1 if n is None else n for name, n in grid.items()})
    dtype = dtype_from_config(config, args.dtype)
    geometry = geometry_from_config(
        config,
        block_size=side["block_size"],
        dtype=args.dtype,
        num_blocks=num_blocks,
        kv_packing=args.kv_packing,
        kernel_block_size=side["kernel_block_size"],
        tp=parallel.tp,
        stages=stages,
    )
    return PolicyContext(
        geometry=geometry,
        grid=parallel,
        canonical=args.canonical,
        canonical_order=args.canonical_order,
        layout=KVCacheLayout.parse(side["layout"]),
        backend=BackendCapabilities(
            name="simulated",
            stride_aware=not args.no_stride_aware,
            layouts=_layouts(args.backend_layouts),
        ),
        dtype=dtype,
        encoding=args.encoding,
    )


def engine_of(context: PolicyContext) -> dict[str, Any]:
    """What the simulated engine can do, for the report."""
    layouts = context.backend.layouts
    return {
        "name": context.backend.name,
        "simulated": True,
        "stride_aware": context.backend.stride_aware,
        "layouts": None if layouts is None else sorted(layout.value for layout in layouts),
    }
