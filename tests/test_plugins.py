"""Discovery, selection, loading with isolation. The plugins are in tests/dists, installed."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy import (
    CacheGeometry,
    Connector,
    DuplicatePluginError,
    OptionError,
    PluginError,
    PluginSet,
    PolicyContext,
    UnknownPluginError,
    Vote,
    hookimpl,
    load_plugins,
    select,
)
from kvpolicy.plugins import parse_priorities
from kvpolicy.specs import AttentionSpec

DISTS = Path(__file__).parent / "dists"
BUILT_IN = {"canonical": 100, "cross-layer": 50, "direct": -100, "host-copy": -100}


@pytest.fixture
def install(monkeypatch):
    """Installs folders of tests/dists, the first one found first."""

    def put(*cases):
        for case in reversed(cases):
            assert (DISTS / case).is_dir()
            monkeypatch.syspath_prepend(str(DISTS / case))

    yield put
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def chosen(*names, plugins=None, **more):
    """The built-ins and the named plugins."""
    return load_plugins(select(names=names, environ={}, **more), plugins)


def listed(plugins, name):
    return next(info for info in plugins.infos if info.name == name)


def context(options=None):
    spec = AttentionSpec(block_size=16, total_kv_heads=4, head_size=8, itemsize=2)
    geometry = CacheGeometry(layers={"a": spec, "b": spec}, num_blocks=2)
    return PolicyContext(geometry=geometry, options=options or {})


class Voter:
    """A plugin that is handed over as an object."""

    def __init__(self, answer=True, **attributes):
        self.answer = answer
        vars(self).update(attributes)

    @hookimpl
    def prefer_cross_layer_blocks(self):
        return Vote(self.answer, "an object's vote")


# What is built in.


def test_the_built_ins_are_plugins_like_any_other():
    found = chosen()
    assert {i.name: i.priority for i in found.infos if i.status == "active"} == BUILT_IN
    for name in BUILT_IN:
        info = listed(found, name)
        assert (info.distribution, info.version) == ("kvpolicy", kvpolicy.__version__)
        assert info.reason == ""
    assert listed(found, "canonical").hooks == ("prefer_cross_layer_blocks", "register_layers")
    assert listed(found, "host-copy").hooks == ("transfer",)


def test_plugins_are_asked_by_priority_then_by_name():
    found = chosen(
        plugins={"z": Voter(priority=60), "y": Voter(priority=60), "x": Voter(priority=-200)}
    )
    assert [p.info.name for p in found.active] == [
        "canonical",
        "y",
        "z",
        "cross-layer",
        "direct",
        "host-copy",
        "x",
    ]
    assert [p.info.name for p in found.having("prefer_cross_layer_blocks")] == [
        "canonical",
        "y",
        "z",
        "cross-layer",
        "x",
    ]


def test_installed_plugins_are_asked_in_one_order_however_they_were_installed(install, monkeypatch):
    cases = ("good", "module_plugin", "zero_hooks")
    names = [case.replace("_", "-") for case in cases]
    seen = set()
    for order in itertools.permutations(cases):
        with monkeypatch.context() as patched:
            for case in order:
                patched.syspath_prepend(str(DISTS / case))
            found = chosen(*names)
            seen.add((found.infos, tuple(plugin.info.name for plugin in found.active)))
    assert len(seen) == 1
    [(infos, active)] = seen
    assert {"good", "module-plugin"} <= set(active)
    assert set(names) <= {info.name for info in infos}


# Discovery imports nothing.

PROBE = """
import json, sys
from kvpolicy import load_plugins, select
found = load_plugins(select())
print(json.dumps({
    "acme": sorted(name for name in sys.modules if name.startswith("acme_")),
    "torch": "torch" in sys.modules,
    "status": {info.name: info.status for info in found.infos},
}))
"""


def probe(*cases, **environment):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVPOLICY_")}
    paths = os.pathsep.join(str(DISTS / case) for case in cases)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        env={**kept, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_plugin_that_is_not_selected_is_listed_without_being_imported():
    told = probe("good", "module_plugin", "raises_system_exit", KVPOLICY_PLUGINS="good")
    assert told["acme"] == ["acme_good"]
    assert told["status"]["good"] == "active"
    assert told["status"]["module-plugin"] == "not-selected"
    assert told["status"]["raises-system-exit"] == "not-selected"


def test_discovery_and_loading_do_not_import_torch():
    told = probe("good", "module_plugin", KVPOLICY_PLUGINS="good,module-plugin")
    assert told["status"]["module-plugin"] == told["status"]["canonical"] == "active"
    assert told["torch"] is False


def test_without_a_selection_every_installed_plugin_is_loaded():
    told = probe("good", "module_plugin", "import_error")
    assert told["acme"] == ["acme_good", "acme_module_plugin"]  # import_error did not survive
    assert told["status"]["import-error"] == "failed"


def test_an_empty_selection_loads_the_built_ins_only():
    told = probe("good", KVPOLICY_PLUGINS="")
    assert told["acme"] == []
    assert {n for n, status in told["status"].items() if status == "active"} == {*BUILT_IN}


# Loading with isolation: each fault is told by name, distribution and version (C25).

FAULTS = {
    "import_error": "cannot be imported: ImportError: libacme.so.3: cannot open shared object file",
    "raises_system_exit": "cannot be imported: SystemExit: usage: acme COMMAND",
    "missing_attribute": "cannot be imported: AttributeError: module 'acme_missing_attribute' has "
    "no attribute 'policy'",
    "bad_reference": "has an entry point 'not a reference', which is no reference; possible: "
    "module or module:object",
    "misspelt_hook": "does not fit the hooks: 'prefer_cross_layer_block' is no hook; did you mean "
    "'prefer_cross_layer_blocks' or 'register_layers'?",
    "misspelt_optional_hook": "does not fit the hooks: 'register_layer' is no hook; did you mean "
    "'register_layers' or 'prefer_cross_layer_blocks'?",
    "too_many_arguments": "does not fit the hooks: 'prefer_cross_layer_blocks' asks for "
    "'weather'; possible: context",
    "zero_hooks": "has no hook; mark one of prefer_cross_layer_blocks, register_layers, transfer "
    "with @kvpolicy.hookimpl (another project's marker does not count)",
    "wrong_marker": "has no hook; mark one of prefer_cross_layer_blocks, register_layers, "
    "transfer with @kvpolicy.hookimpl (another project's marker does not count)",
    "numbers": "has no hook; mark one of prefer_cross_layer_blocks, register_layers, transfer "
    "with @kvpolicy.hookimpl (another project's marker does not count)",
    "hook_twice": "implements 'prefer_cross_layer_blocks' twice; keep one of the two functions",
    "a_class": "is a class; give an instance or a module",
    "wrapper": "marks 'prefer_cross_layer_blocks' as hookwrapper; wrappers, tryfirst and trylast "
    "are refused, set its priority instead",
    "new_wrapper": "marks 'prefer_cross_layer_blocks' as wrapper; wrappers, tryfirst and trylast "
    "are refused, set its priority instead",
    "tryfirst": "marks 'prefer_cross_layer_blocks' as tryfirst; wrappers, tryfirst and trylast "
    "are refused, set its priority instead",
    "trylast": "marks 'prefer_cross_layer_blocks' as trylast; wrappers, tryfirst and trylast "
    "are refused, set its priority instead",
    "newer_api": "requires plugin API 2, but this kvpolicy has 1; upgrade kvpolicy or install an "
    "older version of the plugin",
    "bad_api": "has requires_api '1', which is not a whole number",
    "bad_priority": "has priority 'high', which is not a whole number",
    "true_priority": "has priority True, which is not a whole number",
    "raising_property": "fails its rehearsal: OSError: no such file: acme.toml",
}
faults = pytest.mark.parametrize("case", FAULTS)


def shipped(case):
    """Name, distribution and version, as the folder says them."""
    [folder] = (DISTS / case).glob("*.dist-info")
    distribution, version = folder.name.removesuffix(".dist-info").split("-")
    return case.replace("_", "-"), distribution.replace("_", "-"), version


@faults
def test_a_broken_plugin_is_out_and_listed_and_a_good_one_works_c25(install, case):
    name, distribution, version = shipped(case)
    install(case, "good")
    found = chosen("good", name)
    info = listed(found, name)
    assert (info.distribution, info.version) == (distribution, version)
    assert info.status == "failed"
    assert info.reason == FAULTS[case]
    assert info.hooks == ()
    assert {plugin.info.name for plugin in found.active} == {*BUILT_IN, "good"}
    assert listed(found, "good").status == "active"


@faults
def test_a_broken_plugin_stops_a_strict_start_up_c25(install, case):
    name, distribution, version = shipped(case)
    install(case, "good")
    with pytest.raises(PluginError) as caught:
        chosen("good", name, strict=True)
    assert str(caught.value) == f"plugin {name!r} ({distribution} {version}) {FAULTS[case]}"
    error = caught.value
    assert (error.plugin_name, error.distribution, error.version) == (name, distribution, version)


def test_every_folder_of_dists_is_used_by_a_test():
    cases = {path.name for path in DISTS.iterdir() if path.is_dir()}
    here = Path(__file__).parent
    files = ("test_plugins.py", "test_startup.py", "test_hook_version.py")
    told = "".join((here / file).read_text() for file in files)
    assert {case for case in cases if f'"{case}"' not in told} == set()


def test_a_strict_start_up_of_good_plugins_goes_through(install):
    install("good", "module_plugin")
    assert chosen("good", "module-plugin", strict=True).strict


def test_a_plugin_that_is_not_selected_cannot_be_a_fault(install):
    install("import_error", "good")
    found = chosen("good", strict=True)
    info = listed(found, "import-error")
    assert (info.status, info.reason) == ("not-selected", "not named by the plugins argument")
    assert (info.distribution, info.version) == ("acme-import-error", "3.1")


def test_entry_points_that_cannot_be_read_are_one_fault_among_good_plugins(install):
    install("broken_entry_points", "good")
    info = listed(load_plugins(select()), "broken-entry-points")
    assert info.status == "failed"
    assert "metadata cannot be read; install again" in info.reason
    assert listed(load_plugins(select()), "good").status == "active"


@pytest.mark.parametrize("case", ["no_metadata", "latin_metadata"])
def test_an_installation_without_readable_metadata_is_one_fault_among_good_plugins(install, case):
    name = case.replace("_", "-")
    install(case, "good")
    found = chosen("good", name)
    info = listed(found, name)
    assert info.status == "failed"
    assert info.reason == (
        "has an installation whose metadata cannot be read; install again what provides "
        f"'acme_{case}:policy'"
    )
    assert listed(found, "good").status == "active"
    with pytest.raises(PluginError, match=f"^plugin '{name}' has an installation whose metadata"):
        chosen(name, strict=True)


def test_an_object_whose_attributes_raise_is_one_fault_among_good_plugins():
    class Unreadable:
        @property
        def name(self):
            raise OSError("no name today")

        @property
        def priority(self):
            raise OSError("no priority today")

        @hookimpl
        def prefer_cross_layer_blocks(self):
            return True

    found = chosen(plugins=[Unreadable(), Voter(name="fine")])
    assert listed(found, "Unreadable").reason == "fails its rehearsal: OSError: no priority today"
    assert listed(found, "fine").status == "active"


# What a plugin says of itself, and does beside its hooks.


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("", ""),
        ("no batched copy: one call for each run", "no batched copy: one call for each run"),
        ("red \x1b[31m and\nbroken", "red  [31m and broken"),
    ],
)
def test_an_active_plugin_s_own_status_is_listed(said, shown):
    info = listed(chosen(plugins=[Voter(name="acme", status=lambda: said)]), "acme")
    assert (info.status, info.reason) == ("active", shown)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"status": lambda: None}, "has a status() that answers None, which is no string"),
        ({"status": "fine"}, "has status 'fine', which is no function"),
        ({"status": lambda: 1 // 0}, "fails its rehearsal: ZeroDivisionError: "),
        ({"prepare_rows": 3}, "has prepare_rows 3, which is no function"),
        ({"calibration": {}}, "has calibration {}, which is no function"),
    ],
)
def test_a_function_that_is_none_or_answers_wrongly_is_a_fault(attributes, reason):
    info = listed(chosen(plugins=[Voter(name="acme", **attributes)]), "acme")
    assert (info.status, info.reason.startswith(reason)) == ("failed", True), info.reason


def test_a_fault_is_told_in_the_same_words_in_every_process(install):
    class Greedy:
        @hookimpl
        def register_layers(self, context, z, a, m):
            return None

    found = chosen(plugins=[Greedy()])
    assert listed(found, "Greedy").reason == (  # no set, whose order is the hash seed's
        "does not fit the hooks: 'register_layers' asks for 'z', 'a', 'm'; possible: context, "
        "decision, caches"
    )


def test_a_wrapper_that_is_no_generator_is_refused():
    class Wrapper:
        @hookimpl(wrapper=True)
        def prefer_cross_layer_blocks(self):
            return True

    reason = listed(chosen(plugins=[Wrapper()]), "Wrapper").reason
    assert reason.startswith("does not fit the hooks: ")
    assert "is not a generator function" in reason


def test_a_plugin_out_of_the_set_is_wholly_out_and_keeps_what_is_known_of_it(install):
    install("good")
    found = chosen("good").without("good", "was rude")
    assert "good" not in {plugin.info.name for plugin in found.active}
    info = listed(found, "good")
    assert (info.status, info.reason, info.priority) == ("failed", "was rude", 10)
    with pytest.raises(PluginError, match=r"^plugin 'good' \(acme-good 1\.2\) was rude$"):
        chosen("good", strict=True).without("good", "was rude")


# What a good plugin may do.


def test_a_plugin_for_fewer_hook_arguments_works_c28(install):
    install("good")
    found = chosen("good")
    info = listed(found, "good")
    assert info.hooks == ("prefer_cross_layer_blocks", "register_layers", "transfer")
    assert info.priority == 10
    good = next(plugin for plugin in found.active if plugin.info.name == "good")
    offered = {"context": context(), "decision": None, "caches": None, "job": None}
    assert good.call("prefer_cross_layer_blocks", **offered) == Vote(None, "good has no opinion")
    assert good.call("register_layers", **offered) is None
    assert good.call("transfer", **offered) is None
    votes = {vote.plugin: vote for vote in Connector(context(), ["good"]).decision.votes}
    assert votes["good"].reason == "good has no opinion"


def test_a_module_is_a_plugin(install):
    install("module_plugin")
    connector = Connector(context(), ["module-plugin"])
    votes = {vote.plugin: vote for vote in connector.decision.votes}
    assert votes["module-plugin"].reason == "2 layers seen"
    assert votes["module-plugin"].priority == 7


@pytest.mark.parametrize("needed", [1, 0])
def test_a_plugin_for_our_api_or_an_older_one_is_taken_c28(needed):
    found = chosen(plugins=[Voter(name="dated", requires_api=needed)])
    assert listed(found, "dated").status == "active"


# Two plugins of one name (C27).


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("names", [(), ("duplicate",)])
@pytest.mark.parametrize("order", [("duplicate_a", "duplicate_b"), ("duplicate_b", "duplicate_a")])
def test_two_distributions_of_one_plugin_name_are_refused_and_both_named_c27(
    install, order, names, strict
):
    install(*order)
    with pytest.raises(DuplicatePluginError) as caught:
        chosen(*names, strict=strict)
    assert str(caught.value) == (
        "two plugins are named 'duplicate': from acme-duplicate-a 1.0 and from acme-duplicate-b "
        "4.5; keep one of them, uninstall or rename the others"
    )
    assert caught.value.plugin_name == "duplicate"
    assert caught.value.distribution == "acme-duplicate-a 1.0 and acme-duplicate-b 4.5"


def test_an_object_and_two_distributions_of_one_name_are_all_named_c27(install):
    install("duplicate_b", "duplicate_a")
    with pytest.raises(DuplicatePluginError) as caught:
        chosen(plugins=[Voter(name="duplicate")])
    assert str(caught.value).startswith(
        "3 plugins are named 'duplicate': from acme-duplicate-a 1.0 and from acme-duplicate-b 4.5 "
        "and from an object;"
    )


def test_an_object_cannot_take_a_built_in_name():
    with pytest.raises(DuplicatePluginError, match=r"'direct': from an object and from kvpolicy "):
        chosen(plugins=[Voter(name="direct")])
    with pytest.raises(DuplicatePluginError, match=r"'v': from an object and from an object;"):
        chosen(plugins=[Voter(name="v"), Voter(name="v")])


# Names that are not there (C26).


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        ({"names": ["goood"]}, "the plugins argument"),
        ({"options": {"kvpolicy": {"plugins": "goood"}}}, "options['kvpolicy']['plugins']"),
        ({"environ": {"KVPOLICY_PLUGINS": "goood"}}, "KVPOLICY_PLUGINS"),
    ],
)
def test_a_selected_plugin_that_is_not_installed_is_an_error_with_close_names_c26(
    install, arguments, source, strict
):
    install("good")
    with pytest.raises(UnknownPluginError) as caught:
        load_plugins(select(**{"environ": {}, **arguments}, strict=strict))
    assert str(caught.value) == (
        f"{source} names plugin 'goood', which is not installed; did you mean 'good'?"
    )
    assert caught.value.plugin_name == "goood"
    assert caught.value.exit_status == 2


def test_a_name_like_no_other_is_answered_with_what_there_is_c26():
    with pytest.raises(UnknownPluginError) as caught:
        chosen("xyzzy")
    assert "which is not installed; known: " in str(caught.value)
    assert "canonical, cross-layer, direct, host-copy" in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
def test_a_priority_for_a_plugin_that_is_not_installed_is_an_error_with_close_names_c26(strict):
    with pytest.raises(UnknownPluginError) as caught:
        chosen(priorities={"crosslayer": 5}, strict=strict)
    assert str(caught.value) == (
        "a priority names plugin 'crosslayer', which is not installed; did you mean 'cross-layer'?"
    )
    assert caught.value.plugin_name == "crosslayer"


# Selection: argument over options over environment.


def options(**own):
    return {"kvpolicy": own}


@pytest.mark.parametrize(
    ("arguments", "names", "source"),
    [
        ({}, None, ""),
        ({"environ": {"KVPOLICY_PLUGINS": "e"}}, ("e",), "KVPOLICY_PLUGINS"),
        ({"environ": {"KVPOLICY_PLUGINS": " e , f,,e "}}, ("e", "f"), "KVPOLICY_PLUGINS"),
        ({"environ": {"KVPOLICY_PLUGINS": ""}}, (), "KVPOLICY_PLUGINS"),
        (
            {"environ": {"KVPOLICY_PLUGINS": "e"}, "options": options(plugins=["o", "p"])},
            ("o", "p"),
            "options['kvpolicy']['plugins']",
        ),
        (
            {"environ": {"KVPOLICY_PLUGINS": "e"}, "options": options(plugins=[])},
            (),
            "options['kvpolicy']['plugins']",
        ),
        (
            {"environ": {"KVPOLICY_PLUGINS": "e"}, "options": options(priority={})},
            ("e",),
            "KVPOLICY_PLUGINS",
        ),
        (
            {
                "environ": {"KVPOLICY_PLUGINS": "e"},
                "options": options(plugins=["o"]),
                "names": ["a"],
            },
            ("a",),
            "the plugins argument",
        ),
        ({"options": options(plugins="o"), "names": ()}, (), "the plugins argument"),
        ({"names": "a,b"}, ("a", "b"), "the plugins argument"),
    ],
)
def test_the_highest_source_of_names_replaces_the_whole_list(arguments, names, source):
    selection = select(**{"environ": {}, **arguments})
    assert selection.names == names
    assert selection.source == source


def test_priorities_merge_by_name_highest_source_last():
    selection = select(
        options(priority="b=20,c=30"),
        priorities={"c": 300},
        environ={"KVPOLICY_PRIORITY": "a=1, b = 2 ,c=3"},
    )
    assert selection.priorities == {"a": 1, "b": 20, "c": 300}


def test_the_environment_is_the_process_s_own_by_default(monkeypatch):
    monkeypatch.setenv("KVPOLICY_PLUGINS", "e")
    monkeypatch.setenv("KVPOLICY_PRIORITY", "e=-4")
    monkeypatch.setenv("KVPOLICY_STRICT", "1")
    selection = select()
    assert (selection.names, selection.priorities, selection.strict) == (("e",), {"e": -4}, True)


@pytest.mark.parametrize("word", ["1", "true", "YES", " on "])
def test_strict_words_that_mean_yes(word):
    assert select(environ={"KVPOLICY_STRICT": word}).strict is True


@pytest.mark.parametrize("word", ["0", "False", "no", "off", ""])
def test_strict_words_that_mean_no(word):
    assert select(environ={"KVPOLICY_STRICT": word}).strict is False


def test_strict_comes_from_the_highest_source_that_says_it():
    loose, strict = {"KVPOLICY_STRICT": "0"}, {"KVPOLICY_STRICT": "1"}
    assert select(environ={}).strict is False
    assert select(options(strict=True), environ=loose).strict is True
    assert select(options(strict=False), environ=strict).strict is False
    assert select(options(strict=True), strict=False, environ=strict).strict is False
    assert select(options(strict=False), strict=True, environ=loose).strict is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": 5}, "the plugins argument is a list of plugin names, not 5"),
        ({"names": ["a", 3]}, "the plugins argument is a list of plugin names; 3 is none"),
        (
            {"options": options(plugins=True)},
            "options['kvpolicy']['plugins'] is a list of plugin names, not True",
        ),
        ({"options": {"kvpolicy": "good"}}, "options['kvpolicy'] is a mapping, not 'good'"),
        (
            {"options": options(plugin=["a"])},
            "options['kvpolicy'] has no key 'plugin'; did you mean 'plugins'?",
        ),
        (
            {"options": options(verbose=1)},
            (
                "options['kvpolicy'] has no key 'verbose'; known: plugins, priorities, priority, "
                "strict"
            ),
        ),
        (
            {"environ": {"KVPOLICY_PRIORITY": "canonical"}},
            "KVPOLICY_PRIORITY is NAME=INTEGER, as in canonical=200; found 'canonical'",
        ),
        (
            {"environ": {"KVPOLICY_PRIORITY": "a=1,=5"}},
            "KVPOLICY_PRIORITY is NAME=INTEGER, as in canonical=200; found '=5'",
        ),
        (
            {"environ": {"KVPOLICY_PRIORITY": "canonical=abc"}},
            "KVPOLICY_PRIORITY: the priority of 'canonical' is a whole number, not 'abc'",
        ),
        (
            {"options": options(priority="own=1.5")},
            "options['kvpolicy']['priority']: the priority of 'own' is a whole number, not '1.5'",
        ),
        (
            {"options": options(priority=7)},
            "options['kvpolicy']['priority'] maps plugin names to integers; found 7",
        ),
        (
            {"priorities": {"canonical": True}},
            "the priorities argument: the priority of 'canonical' is a whole number, not True",
        ),
        (
            {"priorities": {"canonical": 1.5}},
            "the priorities argument: the priority of 'canonical' is a whole number, not 1.5",
        ),
        ({"environ": {"KVPOLICY_STRICT": "maybe"}}, "KVPOLICY_STRICT is 1 or 0, not 'maybe'"),
        ({"options": options(strict=2)}, "options['kvpolicy']['strict'] is 1 or 0, not 2"),
        ({"strict": "si"}, "the strict argument is 1 or 0, not 'si'"),
    ],
)
def test_a_selection_that_cannot_be_is_refused_in_words(arguments, message):
    with pytest.raises(OptionError) as caught:
        select(**{"environ": {}, **arguments})
    assert str(caught.value) == message


def test_priorities_are_parsed_from_text_and_mappings():
    assert parse_priorities("a=1, b=-2,", "x") == {"a": 1, "b": -2}
    assert parse_priorities({"a": 1, "b": "-2"}, "x") == {"a": 1, "b": -2}
    assert parse_priorities("", "x") == {}


def test_a_priority_from_outside_goes_over_the_plugin_s_own(install):
    install("good")
    found = chosen("good", priorities="good=75,direct=300")
    assert listed(found, "good").priority == 75
    assert [p.info.name for p in found.active][:4] == ["direct", "canonical", "good", "cross-layer"]


# What the connector takes for plugins.


def statuses(connector):
    return {info.name: info.status for info in connector.plugins.infos}


def test_the_connector_s_argument_goes_over_options_and_options_over_the_environment(
    install, monkeypatch
):
    install("good", "module_plugin", "half_registration")
    monkeypatch.setenv("KVPOLICY_PLUGINS", "half-registration")
    asked = context(options(plugins=["module-plugin"]))
    found = Connector(asked, ["good"])
    assert statuses(found)["good"] == "active"
    assert (
        statuses(found)["module-plugin"] == statuses(found)["half-registration"] == ("not-selected")
    )
    assert listed(found.plugins, "module-plugin").reason == "not named by the plugins argument"

    found = Connector(asked)
    assert statuses(found)["module-plugin"] == "active"
    assert listed(found.plugins, "good").reason == ("not named by options['kvpolicy']['plugins']")

    found = Connector(context())
    assert statuses(found)["half-registration"] == "active"
    assert listed(found.plugins, "good").reason == "not named by KVPOLICY_PLUGINS"

    monkeypatch.delenv("KVPOLICY_PLUGINS")
    found = Connector(context())
    assert {statuses(found)[n] for n in ("good", "module-plugin", "half-registration")} == {
        "active"
    }
    for built_in in BUILT_IN:
        assert statuses(found)[built_in] == "active"


def test_the_connector_s_priorities_go_over_options_and_environment(monkeypatch):
    monkeypatch.setenv("KVPOLICY_PRIORITY", "canonical=1,direct=1,host-copy=1")
    connector = Connector(
        context(options(priority={"direct": 2, "host-copy": 2})), priorities={"host-copy": 3}
    )
    found = {info.name: info.priority for info in connector.plugins.infos}
    assert (found["canonical"], found["direct"], found["host-copy"]) == (1, 2, 3)


def test_the_connector_is_strict_if_any_source_says_so(install, monkeypatch):
    install("zero_hooks")
    assert statuses(Connector(context(), ["zero-hooks"]))["zero-hooks"] == "failed"
    with pytest.raises(PluginError, match=r"plugin 'zero-hooks' .* has no hook"):
        Connector(context(), ["zero-hooks"], strict=True)
    with pytest.raises(PluginError, match=r"plugin 'zero-hooks' .* has no hook"):
        Connector(context(options(strict=True, plugins="zero-hooks")))
    monkeypatch.setenv("KVPOLICY_STRICT", "1")
    with pytest.raises(PluginError, match=r"plugin 'zero-hooks' .* has no hook"):
        Connector(context(), ["zero-hooks"])


def test_names_and_objects_are_given_in_one_list(install):
    install("good", "module_plugin")
    found = statuses(Connector(context(), ["good", Voter(name="mine")]))
    assert found["mine"] == found["good"] == "active"
    assert found["module-plugin"] == "not-selected"
    assert {found[name] for name in BUILT_IN} == {"active"}


@pytest.mark.parametrize("plugins", [[Voter(name="mine")], {"mine": Voter()}])
def test_objects_alone_leave_the_built_ins_and_nothing_else_installed(install, plugins):
    install("good")
    found = statuses(Connector(context(), plugins))
    assert found["mine"] == "active"
    assert found["good"] == "not-selected"
    assert {found[name] for name in BUILT_IN} == {"active"}


def test_names_are_given_as_text_too(install):
    install("good", "module_plugin")
    found = statuses(Connector(context(), "good, module-plugin"))
    assert found["good"] == found["module-plugin"] == "active"
    assert statuses(Connector(context(), ""))["good"] == "not-selected"


def test_objects_go_by_their_name_their_key_their_module_or_their_type(install):
    install("module_plugin")
    import acme_module_plugin

    found = chosen(plugins=[Voter(name="called"), Voter(), acme_module_plugin])
    assert {"called", "Voter", "acme_module_plugin"} <= {p.info.name for p in found.active}
    found = chosen(plugins={"key": Voter(name="called")})
    assert "key" in {plugin.info.name for plugin in found.active}
    assert listed(found, "key").distribution == listed(found, "key").version == ""


def test_a_plugin_set_is_taken_as_it_is(install):
    install("good")
    plugins = chosen("good", priorities={"good": 3})
    assert isinstance(plugins, PluginSet)
    connector = Connector(context(options(plugins=["nobody"])), plugins)
    assert connector.plugins.infos == plugins.infos


def test_a_class_is_refused_at_rehearsal():
    found = chosen(plugins={"klass": Voter, "fine": Voter()})
    assert listed(found, "klass").status == "failed"
    assert listed(found, "klass").reason == "is a class; give an instance or a module"
    assert listed(found, "fine").status == "active"
    with pytest.raises(PluginError, match=r"^plugin 'Voter' is a class; give an instance or a mod"):
        chosen(plugins=[Voter], strict=True)


@pytest.mark.parametrize("plugins", [42, Voter(name="alone")])
def test_plugins_that_are_no_list_are_refused(plugins):
    with pytest.raises(OptionError) as caught:
        Connector(context(), plugins)
    assert str(caught.value) == (
        "plugins is a PluginSet, a list of names and objects, or a mapping of names to objects, "
        f"not {plugins!r}"
    )
