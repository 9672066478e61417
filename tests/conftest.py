"""What every test shares: hypothesis profiles and an environment without our switches."""

import os

import pytest
from hypothesis import settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=100, database=None, print_blob=True
)
settings.register_profile("long", deadline=None, max_examples=2_000)
settings.load_profile("ci")  # --hypothesis-profile=long searches on


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVPOLICY_")]:
        monkeypatch.delenv(name)
