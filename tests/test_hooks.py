"""Each hook is documented, with its exact signature, in one order."""

import inspect
import re
from pathlib import Path

import pluggy
import pytest

import kvpolicy
import kvpolicy.hooks as hooks

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "hooks.md"
ORDER = ("When:", "Owner:", "Args:", "Returns:", "None means:", "Raises:")
# As the design fixes them.
SIGNATURES = {
    "prefer_cross_layer_blocks": "(context: PolicyContext) -> bool | Vote | None",
    "register_layers": "(context: PolicyContext, decision: LayoutDecision, caches: KVCaches) -> "
    "Registration | None",
    "transfer": "(job: TransferJob) -> TransferHandle | None",
}
every_hook = pytest.mark.parametrize("name", hooks.HOOKS)


def signature(name):
    """The signature as its source says it, without the quotes of deferred annotations."""
    return str(inspect.signature(getattr(hooks, name))).replace("'", "")


def manager():
    made = pluggy.PluginManager(hooks.PROJECT)
    made.add_hookspecs(hooks)
    return made


def test_the_hooks_are_the_hookspecs():
    specified = {name for name in vars(manager().hook) if not name.startswith("_")}
    assert specified == {*hooks.HOOKS} == {*SIGNATURES}
    assert list(hooks.HOOKS) == sorted(set(hooks.HOOKS))


@every_hook
def test_the_signature_is_the_fixed_one(name):
    assert signature(name) == SIGNATURES[name]


@every_hook
def test_the_first_answer_settles_what_only_one_plugin_can_do(name):
    """Every plugin votes; one registers, one copies."""
    first = bool(getattr(manager().hook, name).spec.opts["firstresult"])
    assert first is (name != "prefer_cross_layer_blocks")


@every_hook
def test_the_docstring_answers_in_one_order(name):
    text = inspect.getdoc(getattr(hooks, name))
    places = [re.search(rf"^{re.escape(word)}", text, re.MULTILINE) for word in ORDER]
    assert None not in places
    starts = [place.start() for place in places]
    assert starts == sorted(starts)
    assert text.splitlines()[0].endswith(".")
    for word, start, end in zip(ORDER, starts, [*starts[1:], len(text)], strict=True):
        assert text[start + len(word) : end].strip(), f"{word} says nothing"


@every_hook
def test_the_docstring_explains_each_argument(name):
    text = inspect.getdoc(getattr(hooks, name))
    section = text[text.index("Args:") : text.index("Returns:")]
    explained = re.findall(r"^    (\w+): \S", section, re.MULTILINE)
    assert explained == list(inspect.signature(getattr(hooks, name)).parameters)


@every_hook
def test_the_page_has_each_hook_with_its_exact_signature(name):
    page = re.sub(r"\s+", "", DOCS.read_text(encoding="utf-8")).replace(",)", ")")
    assert re.sub(r"\s+", "", f"{name}{signature(name)}") in page


@pytest.mark.parametrize("attribute", ["priority", "requires_api", *hooks.FUNCTIONS])
def test_the_page_tells_of_a_plugin_s_own_attributes(attribute):
    assert f"`{attribute}" in DOCS.read_text(encoding="utf-8")


def test_the_marker_is_the_project_s_and_public():
    assert kvpolicy.hookimpl is hooks.hookimpl
    assert hooks.hookimpl.project_name == hooks.PROJECT == "kvpolicy"
    assert hooks.API_VERSION == 1
