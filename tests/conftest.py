"""What every test shares: hypothesis profiles and an environment without our switches."""

import os
import subprocess
import sys

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


class Child:
    """Another process that runs some code, and can be talked to and killed."""

    def __init__(self, code, *arguments, **environ):
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )

    def says(self):
        line = self.process.stdout.readline().strip()
        if not line:
            raise AssertionError(self.process.stderr.read())
        return line

    def tell(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ends(self):
        """It ends by itself, and well."""
        _, wrong = self.process.communicate(timeout=60)
        assert (self.process.returncode, wrong) == (0, "")

    def kill(self):
        """As kill -9 does; it stays a zombie, since nobody asks for its status."""
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def processes():
    """Starts processes: their code, their arguments, more of their environment."""
    made = []

    def start(code, *arguments, **environ):
        made.append(Child(code, *arguments, **environ))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.communicate()
