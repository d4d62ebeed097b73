"""Fixtures of all tests, and what `cargo xtask test` is told of them."""

import json
import os

import pytest
from helpers import Job


@pytest.fixture
def job():
    """Makes a `Job`; what still runs when the test ends is killed."""
    jobs = []

    def make(*args, **kwargs):
        jobs.append(Job(*args, **kwargs))
        return jobs[-1]

    yield make
    for made in jobs:
        made.kill()


def pytest_sessionfinish(session):
    """Leaves the numbers, and why tests were skipped, where `cargo xtask test` reads them."""
    path = os.environ.get("ALLSTREAM_TEST_RESULTS")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not path or reporter is None:
        return
    of = lambda *kinds: [report for kind in kinds for report in reporter.stats.get(kind, [])]  # noqa: E731
    results = {
        "passed": len(of("passed")),
        "failed": [report.nodeid for report in of("failed", "error")],
        "skipped": [f"{report.nodeid}: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}" for report in of("skipped")],
    }
    with open(path, "w") as file:
        json.dump(results, file)
