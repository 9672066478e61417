"""Who may import whom, read off the sources; what an import may bring along and do."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import kvpolicy

PACKAGE = Path(kvpolicy.__file__).parent

# A room imports only from the rooms before it. __init__.py, which has the public names and nothing
# else, and imports for type checkers are exempt.
ROOMS = (
    "words",
    "errors",
    "values",
    "dtypes",
    "layout",
    "specs",
    "geometry",
    "grid",
    "boxes",
    "pages",
    "strides",
    "canonical",
    "certify",
    "context",
    "slabs",
    "decision",
    "records",
    "identity",
    "caches",
    "registration",
    "slots",
    "hostmemory",
    "hostpool",
    "sharedheader",
    "owners",
    "sharedfile",
    "sharedterms",
    "sharedslots",
    "sharedpool",
    "plan",
    "transfer",
    "hooks",
    "plugins",
    "workers",
    "pieces",
    "policies",
    "explain",
    "startup",
    "jobs",
    "connector",
    "models",
    "cli",
    "testing",
    "__main__",
)
# They may use the public names of the package itself; nothing imports them but what is below.
EDGES = ("cli", "testing", "__main__")
# Where torch is imported when the module is; in the command line, where tensors are made.
TORCH = {
    "caches",
    "registration",
    "hostpool",
    "sharedpool",
    "plan",
    "transfer",
    "connector",
    "cli.bench_cases",
    "cli.bench_costs",
    "cli.bench_references",
    "cli.engine",
}
# What the distribution declares, and what only the kit for plugin authors may ask for.
DEPENDENCIES = {"attrs", "numpy", "pluggy", "rich", "torch"}
TESTING_DEPENDENCIES = {"hypothesis", "pytest"}
# What one module may ask for, of the extra "plot".
PLOT, PLOT_DEPENDENCIES = "cli.bench_plot", {"matplotlib"}


@attrs.frozen
class Import:
    """One imported module.

    Attributes:
        module: its dotted name; for ``from a import b`` both ``a`` and ``b``, joined.
        inside: whether the import stands in a function.
    """

    module: str
    inside: bool

    @property
    def top(self):
        return self.module.split(".")[0]


def imports_of(source):
    """Every import that runs; those for type checkers do not."""
    return list(_imports(ast.parse(source), inside=False))


def _imports(node, inside):
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, inside) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (Import(f"{node.module}.{alias.name}", inside) for alias in node.names)
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in children:
        yield from _imports(child, inside or function)


def modules():
    """Dotted name inside the package -> its imports."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = imports_of(path.read_text(encoding="utf-8"))
    del found[""]
    return found


MODULES = modules()


def room(module):
    return module.split(".")[0]


def imported_room(found):
    """The room that an import enters; "" for the package's own public names."""
    inner = found.module.split(".")[1]
    return inner if inner in ROOMS else ""


def violations(name, imports):
    """What of a module's imports goes against the order of the rooms."""
    mine = ROOMS.index(room(name))
    for found in imports:
        if found.top != "kvpolicy" or imported_room(found) == room(name):
            continue
        entered = imported_room(found)
        if entered == "":
            if room(name) not in EDGES:
                yield f"{name} imports {found.module}: the package itself"
        elif ROOMS.index(entered) > mine:
            yield f"{name} imports {found.module}, which lies below it"


def test_the_checker_sees_what_it_must():
    source = """
import kvpolicy.connector
from kvpolicy import errors, Connector
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from kvpolicy.cli import main
else:
    from kvpolicy.testing import kit
def later():
    from kvpolicy.startup import start_up
"""
    assert list(violations("layout", imports_of(source))) == [
        "layout imports kvpolicy.connector, which lies below it",
        "layout imports kvpolicy.Connector: the package itself",
        "layout imports kvpolicy.testing.kit, which lies below it",
        "layout imports kvpolicy.startup.start_up, which lies below it",
    ]
    assert [found.inside for found in imports_of(source)] == [False] * 5 + [True]
    assert list(violations("connector", imports_of("from kvpolicy.connector import x"))) == []
    assert list(violations("cli", imports_of("from kvpolicy import Connector"))) == []


def test_every_module_has_a_room():
    assert {room(name) for name in MODULES} - {*ROOMS} == set()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_rooms_above_its_own(name):
    assert list(violations(name, MODULES[name])) == []


def test_nothing_imports_the_edges():
    for name, imports in MODULES.items():
        entered = {imported_room(found) for found in imports if found.top == "kvpolicy"}
        others = {*EDGES} - {room(name)} - ({"cli"} if name == "__main__" else set())
        assert entered & others == set(), name


def test_policies_do_not_import_one_another():
    policies = [name for name in MODULES if name.startswith("policies.")]
    assert policies
    for name in policies:
        for found in MODULES[name]:
            assert not found.module.startswith("kvpolicy.policies"), name


def test_torch_is_imported_where_it_is_needed_and_nowhere_else():
    outside = {n for n, found in MODULES.items() if any(_torch(i) and not i.inside for i in found)}
    assert {name for name in outside if room(name) != "testing"} == TORCH
    inside = {n for n, found in MODULES.items() if any(_torch(i) and i.inside for i in found)}
    assert {room(name) for name in inside} - {"policies", "testing"} == set()


def _torch(found):
    return found.top == "torch"


def loaded_with(name):
    """What importing a module of the package imports of the package, as dotted names."""
    seen, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for found in MODULES[current]:
            if found.top == "kvpolicy" and not found.inside:
                parts = found.module.split(".")[1:]
                prefixes = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
                waiting += [prefix for prefix in prefixes if prefix in MODULES]
    return seen


@pytest.mark.parametrize(
    "name", ["plugins", "hooks", "models", "cli", *(n for n in MODULES if "policies" in n)]
)
def test_these_modules_load_without_torch(name):
    assert loaded_with(name) & TORCH == set()


def test_loaded_with_follows_imports():
    assert loaded_with("startup") >= {"registration", "caches", "plugins.loading", "errors"}
    assert "connector" not in loaded_with("startup")


@pytest.mark.parametrize("name", MODULES)
def test_only_declared_dependencies_are_imported(name):
    allowed = {*sys.stdlib_module_names, "kvpolicy", *DEPENDENCIES}
    if room(name) == "testing":
        allowed |= TESTING_DEPENDENCIES
    if name == PLOT:
        allowed |= PLOT_DEPENDENCIES
    assert {found.top for found in MODULES[name]} - allowed == set()  # no vLLM, no plugin


# What happens when it runs.


def run(code, *arguments):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVPOLICY_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env={**kept, "KVPOLICY_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_and_loading_plugins_do_without_torch():
    ran = run(
        "import sys, kvpolicy, kvpolicy.plugins\n"
        "found = kvpolicy.load_plugins(kvpolicy.select())\n"
        "assert len(found.active) == 4, found\n"
        "print('torch' in sys.modules, kvpolicy.Connector.__name__, 'torch' in sys.modules)"
    )
    assert ran.stdout.split() == ["False", "Connector", "True"], ran.stderr


def test_the_command_that_lists_plugins_does_without_torch():
    ran = run(
        "import sys\n"
        "from kvpolicy.cli import main\n"
        "try:\n"
        "    status = main(['plugins', '--json'])\n"
        "except SystemExit as leaving:\n"
        "    status = leaving.code\n"
        "assert not status, status\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    assert ran.stderr.split() == ["False"], ran.stdout
    assert '"cross-layer"' in ran.stdout


def test_importing_kvpolicy_makes_no_manager_reads_no_entry_point_and_starts_no_thread():
    ran = run(
        "import importlib.metadata, os, sys, threading\n"
        "import pluggy\n"
        "def refuse(*args, **kwargs):\n"
        "    raise AssertionError('at import')\n"
        "pluggy.PluginManager.__init__ = refuse\n"
        "importlib.metadata.distributions = refuse\n"
        "before = dict(os.environ)\n"
        "import kvpolicy, kvpolicy.plugins, kvpolicy.models, kvpolicy.policies.canonical\n"
        "import kvpolicy.policies.cross_layer, kvpolicy.policies.direct\n"
        "import kvpolicy.policies.host_copy\n"
        "print(threading.active_count(), dict(os.environ) == before)\n"
        "try:\n"
        "    kvpolicy.load_plugins(kvpolicy.select())\n"
        "except AssertionError as error:\n"
        "    print(error)"
    )
    assert ran.stdout.splitlines() == ["1 True", "at import"], ran.stderr


def test_importing_everything_leaves_torch_s_threads_alone():
    ran = run(
        "import torch\n"
        "before = torch.get_num_threads(), torch.get_num_interop_threads()\n"
        "import kvpolicy\n"
        "for name in kvpolicy.__all__:\n"
        "    getattr(kvpolicy, name)\n"
        "print(before == (torch.get_num_threads(), torch.get_num_interop_threads()))"
    )
    assert ran.stdout.split() == ["True"], ran.stderr
