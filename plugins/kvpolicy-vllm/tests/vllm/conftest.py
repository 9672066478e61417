"""The suite prints what it measured, whatever pytest captures."""

from __future__ import annotations

import pytest

_FIGURES: list[str] = []


@pytest.fixture
def figures(request):
    """Call it with words; they stand at the end of the run, after the test's name."""
    return lambda words: _FIGURES.append(f"{request.node.name}: {words}")


def pytest_terminal_summary(terminalreporter):
    if _FIGURES:
        terminalreporter.section("vLLM figures")
        for line in _FIGURES:
            terminalreporter.write_line(line)
