"""The kit fails every bad fake, with a message that names the property and a small example.

Each fake is run against the property that is there for it, as pytest would run it; the honest
fakes pass them all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis.errors import Unsatisfiable

from kvpolicy import testing
from kvpolicy.testing import PolicyContract, TransferContract, fakes

POLICY = [name for name in dir(PolicyContract) if name.startswith("test_p")]
TRANSFER = [name for name in dir(TransferContract) if name.startswith("test_t")]
EXAMPLE_CHARS = 900


def policy_case(make, **statements):
    """A contract of a plugin that registers everything unless it is stated otherwise."""

    class Case(PolicyContract):
        examples = statements.get("examples", 12)
        votes = statements.get("votes", False)
        registers = statements.get("registers", True)

        def make_policy(self):
            return make()

        def supports(self, context, decision):
            return statements.get("supports", True)

        def expected_vote(self, context):
            return statements.get("expected", ...)

    return Case()


def transfer_case(make, **statements):
    class Case(TransferContract):
        examples = statements.get("examples", 12)

        def make_transfer(self):
            return make()

        def supports(self, job):
            return statements.get("supports", job.device == "cpu")

    return Case()


def property_of(number):
    names = POLICY if number.startswith("P") else TRANSFER
    (name,) = (name for name in names if name.startswith(f"test_{number.lower()}_"))
    return name


def run(case, number):
    getattr(case, property_of(number))()


def failure(case, number):
    """What a person reads: the message, and hypothesis' example."""
    with pytest.raises(AssertionError) as caught:
        run(case, number)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert str(caught.value).startswith(f"{number}: "), caught.value
    assert re.search(r"(Failing test case|Falsifying example): test_" + number.lower(), notes), (
        notes
    )
    (example,) = re.findall(r"trial=(Trial\(.*)", notes)
    assert len(example) < EXAMPLE_CHARS, example
    return str(caught.value), example


def voting(make, number, told, **statements):
    made = {"votes": True, "registers": False, "supports": False, **statements}
    return pytest.param(
        lambda: policy_case(make, **made), number, told, id=f"{number}-{make_name(make)}"
    )


def registering(make, number, told, **statements):
    return pytest.param(
        lambda: policy_case(make, **statements), number, told, id=f"{number}-{make_name(make)}"
    )


def moving(make, number, told, **statements):
    return pytest.param(
        lambda: transfer_case(make, **statements), number, told, id=f"{number}-{make_name(make)}"
    )


def make_name(make):
    return getattr(make, "__name__", "plugin")


def disagreeing():
    return fakes.Voter(True)


BAD = [
    # What is declared is not what is there.
    registering(lambda: object(), "P1", "cannot be loaded"),
    registering(fakes.AnyLayout, "P1", "declared True", votes=True),
    registering(fakes.RankVoter, "P1", "declared True", votes=True),
    moving(fakes.AnyLayout, "T1", "transfer is not among its hooks"),
    moving(lambda: fakes.PlainCopy, "T1", "is a class"),
    # Votes.
    voting(fakes.RaisingVoter, "P2", "raised ValueError: no opinion"),
    voting(fakes.TextVoter, "P2", "voted 'yes'; possible"),
    voting(fakes.NumberVoter, "P2", "voted 0; possible"),
    voting(disagreeing, "P2", "expected_vote says None", expected=None),
    voting(disagreeing, "P2", "expected_vote says False", expected=False),
    voting(fakes.FickleVoter, "P3", "voted True, then False"),
    voting(fakes.Meddler, "P3", "a vote changed the context"),
    voting(fakes.RankVoter, "P4", "rank 0 votes True and rank 1 votes False"),
    voting(fakes.FickleVoter, "P5", "among others"),
    # Registrations.
    registering(fakes.NoRegistration, "P6", "supports says yes"),
    registering(fakes.HalfRegistration, "P6", "registered []; rank 0 holds"),
    registering(fakes.CopyingRegistration, "P7", "not the engine's"),
    registering(fakes.ShiftedRegistration, "P8", "coordinates say"),
    registering(fakes.OverlappingRegistration, "P8", "coordinates say"),
    registering(fakes.DoubledRegistration, "P8", "coordinates say"),
    registering(fakes.HalfRegistration, "P9", "the core refuses"),
    registering(fakes.ShiftedRegistration, "P9", "the core refuses"),
    registering(fakes.CopyingRegistration, "P9", "the core refuses"),
    registering(fakes.ShiftedRegistration, "P10", "registration is refused"),
    registering(fakes.OverlappingRegistration, "P11", "registration is refused"),
    registering(fakes.AnyLayout, "P12", "supports says no, but it registered", supports=False),
    registering(fakes.BareRefusal, "P13", "refused without a code"),
    registering(fakes.MissingTolerated, "P13", "and yet it registered the rest"),
    registering(fakes.Meddler, "P14", "P14: ", votes=True),
    # Transfers.
    moving(fakes.GreedyCopy, "T2", "supports says no to device"),
    moving(fakes.GreedyCopy, "T3", "supports says no to its own", supports=False),
    moving(fakes.RaisingCopy, "T3", "raised RuntimeError: no idea how to store"),
    moving(fakes.SilentCopy, "T3", "supports says yes, but it declined"),
    moving(fakes.OffByOneCopy, "T3", "of the page of layer 'layers.0.attn' on rank 0) is 0x"),
    moving(fakes.HalfCopy, "T3", "(sentinel), should be"),
    moving(fakes.OffByOneCopy, "T4", "layer 'layers.0.attn', kernel row 0"),
    moving(fakes.HalfCopy, "T4", "(sentinel)"),
    moving(fakes.OneWayCopy, "T4", "is 0xfd (sentinel), not 0x"),
    moving(fakes.SpillingCopy, "T5", "padding or a guard zone"),
    moving(fakes.SpillingRowCopy, "T5", "should be untouched"),
    moving(fakes.EarlyCopy, "T6", "once done"),
    moving(fakes.WrongResult, "T7", "no failed ids"),
    moving(fakes.WrongJob, "T7", "expected job 0"),
    moving(fakes.TextResult, "T7", "not a TransferResult"),
    moving(fakes.OncePerSource, "T8", "(sentinel)"),
    moving(fakes.SharedStateCopy, "T9", "at once"),
    moving(fakes.HidesFailures, "T10", "memory that fails"),
    moving(fakes.ForgetsFailures, "T10", "but "),
    moving(fakes.NamelessFailures, "T10", "without naming its own"),
    moving(fakes.MiscountedFailures, "T10", "what is not named as failed has"),
    moving(fakes.StaleCopy, "T11", "slot"),
    moving(fakes.HalfCopy, "T12", "should be"),
    moving(fakes.RaisingCopy, "T12", "no idea"),
]


@pytest.mark.parametrize(("case", "number", "told"), BAD)
def test_a_bad_fake_fails_the_property_that_is_there_for_it(case, number, told):
    message, _ = failure(case(), number)
    assert told in message


def test_a_limit_inside_a_copy_engine_shows_at_size():
    """T13 draws no examples: one large job is the example."""
    with pytest.raises(AssertionError, match=r"^T13: stored block 8 of 300 x 2 layers is not"):
        transfer_case(fakes.ShortTableCopy).test_t13_a_large_job_is_moved_whole()


HONEST_POLICIES = {
    "abstains": lambda: policy_case(
        lambda: fakes.Voter(None),
        votes=True,
        registers=False,
        supports=False,
        expected=None,
        examples=4,
    ),
    "disagrees": lambda: policy_case(
        lambda: fakes.Voter(True),
        votes=True,
        registers=False,
        supports=False,
        expected=True,
        examples=4,
    ),
    "any-layout": lambda: policy_case(fakes.AnyLayout, examples=6),
}


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("case", HONEST_POLICIES.values(), ids=HONEST_POLICIES)
def test_an_honest_policy_passes(case, name):
    getattr(case(), name)()


@pytest.mark.parametrize("name", TRANSFER)
def test_an_honest_copy_passes(name):
    getattr(transfer_case(fakes.PlainCopy, supports=True, examples=6), name)()


@pytest.mark.parametrize("number", ["P6"])
def test_a_policy_that_supports_nothing_cannot_pass_for_want_of_examples(number):
    with pytest.raises(Unsatisfiable, match=property_of(number)):
        run(policy_case(fakes.AnyLayout, supports=False, examples=1), number)


def test_the_kit_s_names_are_sorted_and_have_docstrings():
    for module in (testing, fakes):
        assert module.__all__ == sorted(module.__all__)
        for name in module.__all__:
            assert getattr(module, name).__doc__.strip().endswith((".", "tests."))


def test_the_reference_page_lists_every_property_and_every_part():
    page = Path(__file__).parents[1] / "docs" / "reference" / "testing.md"
    text = page.read_text(encoding="utf-8")
    numbers = {name.split("_")[1].upper() for name in (*POLICY, *TRANSFER)}
    assert numbers == set(re.findall(r"^\| ([PT]\d+) \|", text, re.MULTILINE))
    assert {*testing.__all__} - set(re.findall(r"\w+", text)) == set()


MODULE = """
from kvpolicy import testing
from kvpolicy.testing import PolicyContract, TransferContract, fakes


class TestOne(PolicyContract):
    votes, examples = False, 3

    def make_policy(self):
        return fakes.AnyLayout()

    def supports(self, context, decision):
        return True


class TestTwo(TestOne):
    examples = 4

    def make_policy(self):
        return fakes.HalfRegistration()


class TestCopy(TransferContract):
    examples = 2

    def make_transfer(self):
        return fakes.PlainCopy()

    def supports(self, job):
        return True


class TestOwn(TestCopy):
    def test_t10_a_failure_in_the_middle_is_a_true_result(self):
        \"\"\"An author's own; it replaces the kit's.\"\"\"
"""


def test_pytest_collects_several_subclasses_of_one_module(tmp_path):
    (tmp_path / "test_mine.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ran = subprocess.run(
        [*command, "-rf", "-k", "p1_ or p6 or t1_ or t3 or t10", "test_mine.py"],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    failed = re.findall(r"^FAILED test_mine.py::(\w+)::test_(p\d+)", ran.stdout, re.MULTILINE)
    assert failed == [("TestTwo", "p6")], ran.stdout
    assert "1 failed, 9 passed" in ran.stdout
    assert "P6: registered []; rank 0 holds ['layers.0.attn']" in ran.stdout
    assert "trial=Trial(context=PolicyContext(" in ran.stdout


def test_every_property_has_a_fake_that_fails_it():
    tried = {"T13", *(param.values[1] for param in BAD)}
    numbers = {name.split("_")[1].upper() for name in (*POLICY, *TRANSFER)}
    assert numbers == tried


def test_every_fake_is_tried():
    tried = {"ShortTableCopy", *(param.id.split("-", 1)[1] for param in BAD)}
    assert {*fakes.__all__} - tried == {"Voter", "PlainCopy"}
