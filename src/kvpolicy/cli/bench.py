"""``kvpolicy bench``: copies of KV blocks on the host, beside one large copy of the same run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from kvpolicy.cli.options import add_plugin_options, plugins_of
from kvpolicy.cli.output import Output, progress, size, table
from kvpolicy.errors import OptionError
from kvpolicy.models import load_config
from kvpolicy.words import close_names, spare, told

if TYPE_CHECKING:
    from kvpolicy.plugins import PluginSet

_EXAMPLE = """\
examples:
  kvpolicy bench qwen3-30b-a3b.json
  kvpolicy bench qwen3-30b-a3b.json --compare host-copy,numba --plot ratios.svg
  kvpolicy bench --layers 48 --kv-heads 4 --head-size 128 --cases pages --blocks 1

R1 is the speed against one large torch copy, R2 against one large memcpy, both taken between the
measurements. Where no --tp is given, canonical-nhd is measured at 2, canonical-hnd at 4 and the
others at 1, or at what the model allows."""

_SIZES = {"layers": "attention layers", "kv-heads": "KV heads", "head-size": "elements a head"}
_CASES = ("slab", "pages", "pages-irregular", "canonical-hnd", "canonical-nhd")
_IDS = ("scattered", "consecutive")
_MAX_BLOCKS, _MAX_ROUNDS, _MAX_MEGABYTES = 65_536, 1_000, 65_536
_PLOTS = (".png", ".svg")


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure copies on the host against one large copy",
        description="Measures stores and loads of KV blocks on the host, verifies their bytes,\n"
        "and gives their speed against one large copy of the same run.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", metavar="CONFIG.json", nargs="?", help="a model's Hugging Face config.json"
    )
    model = parser.add_argument_group("sizes, instead of CONFIG.json")
    for name, text in _SIZES.items():
        model.add_argument(f"--{name}", type=int, metavar="N", help=text)
    cache = parser.add_argument_group("cache")
    cache.add_argument("--tp", type=int, metavar="N", help="tensor parallel size (by case)")
    cache.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens (16)")
    cache.add_argument("--dtype", help="of the cache; the config's by default")
    cache.add_argument("--kv-packing", default="packed", help="packed or split (packed)")
    cache.add_argument("--group", metavar="NAME", help="the layers to copy (the largest group)")
    run_ = parser.add_argument_group("measurement")
    run_.add_argument("--cases", metavar="A,B", help=f"of {', '.join(_CASES)} (all)")
    run_.add_argument("--ids", metavar="A,B", help=f"of {', '.join(_IDS)} (both)")
    run_.add_argument("--blocks", type=int, default=256, metavar="N", help="of a job (256)")
    run_.add_argument(
        "--megabytes", type=int, default=256, metavar="N", help="MiB of a measurement (256)"
    )
    run_.add_argument("--rounds", type=int, default=9, metavar="N", help="of each kind (9)")
    run_.add_argument(
        "--threads", type=int, default=1, metavar="N", help="of copies and references (1)"
    )
    run_.add_argument("--compare", metavar="A,B", help="these transfer plugins (all that can)")
    run_.add_argument("--plot", metavar="FILE", help="bars of R1, as .png or .svg")
    run_.add_argument(
        "--calibration",
        action="store_true",
        help="only print what copy engines have measured to choose their ways",
    )
    add_plugin_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Output) -> int:
    """Runs the command; torch is imported no sooner."""
    if args.calibration:
        return _calibration(args, out)
    report = _measured(args, out)
    if args.plot:
        from kvpolicy.cli.bench_plot import plot

        plot(report, Path(args.plot))
    out.show(report, lambda console: people(report, console))
    if not report["cases"]:
        return 3  # every case was refused, and the report says why
    return 0 if all(case["verified"] for case in report["cases"]) else 1


def _calibration(args: argparse.Namespace, out: Output) -> int:
    """Prints what the active copy engines have measured, or measure now, of their own ways."""
    given = [f"--{name}" for name in _SIZES if getattr(args, name.replace("-", "_")) is not None]
    if args.config or given:
        raise OptionError("--calibration is of the machine and takes no CONFIG.json or sizes")
    plugins = list(plugins_of(args).having("transfer"))
    able = {plugin.info.name: plugin.functions.get("calibration") for plugin in plugins}
    found = {name: _asked(function) for name, function in able.items() if function is not None}
    if not found:
        raise OptionError(
            f"no active transfer plugin has a calibration; active: {', '.join(able) or 'none'}"
        )

    def people(console: Console) -> None:
        for name, measured in found.items():
            console.print(_branch(Tree(f"[bold]{escape(name)}[/bold]"), measured))

    out.show({"calibration": found}, people)
    return 0


def _asked(calibration: Callable[..., object]) -> object:
    """What a plugin's calibration says, or what came of asking it."""
    try:
        said = json.loads(json.dumps(calibration(), allow_nan=False))
    except BaseException as error:  # noqa: BLE001  see spare
        spare(error)
        return f"failed: {told(error)}"
    return said


def _branch(tree: Tree, value: object) -> Tree:
    """JSON values as a tree."""
    if not isinstance(value, Mapping):
        tree.add(escape(f"{value:,}" if type(value) is int else str(value)))
        return tree
    for key, inner in value.items():
        _branch(tree.add(escape(str(key))), inner)
    return tree


def _between(value: int, low: int, high: int, option: str) -> int:
    if not low <= value <= high:
        raise OptionError(f"{option} lies between {low} and {high:,}, not {value}")
    return value


def _chosen(text: str | None, possible: Sequence[str], option: str) -> list[str]:
    if text is None:
        return [*possible]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in possible:
            raise OptionError(f"{option} has no {name!r}; {close_names(name, possible)}")
    if not names:
        raise OptionError(f"{option} names at least one of {', '.join(possible)}")
    return [name for name in possible if name in names]


def _config(args: argparse.Namespace) -> Mapping[str, Any]:
    """The model's config, or one of the given sizes."""
    given = {name: getattr(args, name.replace("-", "_")) for name in _SIZES}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if args.config:
        if len(missing) < len(_SIZES):
            raise OptionError("give CONFIG.json or sizes, not both")
        return load_config(args.config)
    if missing:
        raise OptionError(f"give CONFIG.json, or sizes: {', '.join(missing)} missing")
    heads = given["kv-heads"]
    return {
        "model_type": "llama",
        "num_hidden_layers": given["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": given["head-size"],
        "hidden_size": heads * given["head-size"],
        "torch_dtype": "bfloat16",
    }


def _names(args: argparse.Namespace, plugins: PluginSet) -> list[str]:
    """The transfer plugins to measure."""
    able = [plugin.info.name for plugin in plugins.having("transfer")]
    if args.compare is None:
        return able
    names = list(dict.fromkeys(name.strip() for name in args.compare.split(",") if name.strip()))
    for name in names:
        if name not in able:
            failed = {info.name: info.reason for info in plugins.infos if info.status == "failed"}
            why = f"is out: {failed[name]}" if name in failed else close_names(name, able)
            raise OptionError(f"--compare names {name!r}, no active transfer plugin; {why}")
    return names


def _measured(args: argparse.Namespace, out: Output) -> dict[str, Any]:
    if args.plot and Path(args.plot).suffix not in _PLOTS:
        raise OptionError(f"--plot takes a name that ends in .png or .svg, not {args.plot!r}")
    _between(args.blocks, 1, _MAX_BLOCKS, "--blocks")
    _between(args.rounds, 1, _MAX_ROUNDS, "--rounds")
    _between(args.megabytes, 1, _MAX_MEGABYTES, "--megabytes")
    _between(args.threads, 1, 256, "--threads")
    kinds = _chosen(args.cases, _CASES, "--cases")
    orders = _chosen(args.ids, _IDS, "--ids")
    config = _config(args)
    plugins = plugins_of(args)

    from kvpolicy.cli import bench_cases, bench_costs, bench_measure, bench_references

    values = argparse.Namespace(**vars(args), **_UNSAID)
    cases, left_out = bench_cases.cases_of(values, config, kinds, orders)
    settings = bench_references.Settings(
        blocks=args.blocks,
        copied_bytes=args.megabytes * 2**20,
        rounds=args.rounds,
        threads=args.threads,
    )
    with (
        bench_references.exact_threads(args.threads),
        progress(out, len(cases) * (args.rounds + 1)) as step,
    ):
        costs, unable = bench_costs.taken_by(plugins, _names(args, plugins))
        names = [cost["plugin"] for cost in costs]
        if not names:
            raise OptionError("no transfer plugin takes copies on the CPU; see kvpolicy plugins")
        references = bench_references.References(settings)
        try:
            found = [
                line
                for case in cases
                for line in bench_measure.measure_case(
                    case, settings, plugins, names, references, step
                )
            ]
        finally:
            references.close()
    return {
        "cases": found,
        "jobs": costs,
        "left_out": left_out,
        "not_on_cpu": unable,
        "noisy": any(line["noisy"] for line in found),
        "threads": args.threads,
        "rounds": args.rounds,
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }


_UNSAID: Mapping[str, Any] = {
    "pp": None,
    "pp_layers": None,
    "dcp": None,
    "pcp": None,
    "cp_interleave": None,
    "kernel_block_size": None,
    "encoding": "",
    "backend_layouts": None,
}


def _page(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"


def people(report: dict[str, Any], console: Console) -> None:
    """Prints the report as tables."""
    rows = [
        (
            one["case"],
            one["plugin"],
            one["direction"],
            one["tp"],
            f"{one['fragments_per_block']} x {size(one['fragment_bytes'])}",
            _page(one["memory_page_bytes"]),
            f"{one['gbps']:.2f}",
            f"{one['r1']:.2f}",
            f"{one['r2']:.2f}",
            f"{one['spread']:.0%}" + (" noisy" if one["noisy"] else ""),
            "yes" if one["verified"] else "NO",
        )
        for one in report["cases"]
    ]
    columns = ("case", "plugin", "", ">tp", ">fragments of a block", ">pages", ">GB/s", ">R1")
    console.print(table(*columns, ">R2", ">spread", "verified", rows=rows))
    if not all(one["verified"] for one in report["cases"]):
        console.print("NOT verified: a plugin does not leave every byte as it must be", style="red")
    console.print()
    console.print(
        "R1, R2: speed against one large torch copy, one large memcpy; "
        f"threads: {report['threads']}; medians of {report['rounds']}"
    )
    for cost in report["jobs"]:
        console.print(
            escape(
                f"{cost['plugin']}: through a connector a job costs {cost['fixed_us']:.0f} us "
                f"however small it is, {cost['submit_us']:.0f} of them until store returns, and "
                f"{cost['block_us']:.1f} us for each further block"
            )
        )
    for kind, why in report["left_out"].items():
        console.print(escape(f"{kind} is left out: {why}"))
    for name in report["not_on_cpu"]:
        console.print(escape(f"{name} is left out: it takes no copies on the CPU"))
    if report["noisy"]:
        console.print(
            "The machine was too noisy to tell where a spread says noisy; measure these again.",
            style="yellow",
        )
