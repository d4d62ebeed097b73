"""A real Ray cluster, started once for all tests, and four actors. Tests that end no actors share the four."""

import itertools
import os
import signal
import sys
from pathlib import Path

import apart
import pytest

try:
    import torch  # noqa: F401

    import allstream.ray
    import ray
except ImportError as missing:
    ray, collect_ignore_glob, _missing = None, ["test_*.py"], missing
else:
    # Before the test modules are imported: their classes name the tensor transport, which must be registered by then.
    allstream.ray.register()

# This module. Its name in sys.modules does not stay: pytest loads other files with the name `conftest` later.
_THIS = sys.modules[__name__]
POOL = 4
# How long any call of a test may take, in seconds.
PATIENCE = 90
_numbers = itertools.count()


def pytest_report_header():
    """Says why the tests of Ray are skipped, if they are."""
    return f"tests/ray is skipped: {_missing}; pip install ray torch ./ffi/python" if ray is None else None


def pytest_collection_modifyitems(items):
    """Makes Ray send the functions of test modules to actors by value, because actors cannot import these modules."""
    for module in {item.module for item in items if "tests/ray" in str(item.path)}:
        ray.cloudpickle.register_pickle_by_value(module)
    for item in items:
        item.add_marker(pytest.mark.timeout(150))


@pytest.fixture(scope="session", autouse=True)
def cluster():
    with apart.environment() as variables, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", variables["RAY_TMPDIR"])
        ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="warning", log_to_driver=False)
        try:
            before = _of_allstream()
            yield
            assert _of_allstream() == before, "files of shared memory were left"
        finally:
            ray.shutdown()


def _of_allstream():
    return {path.name for path in Path("/dev/shm").iterdir() if "allstream" in path.name}


class Rank:
    """An actor that runs whatever function it is given."""

    def do(self, function, *args):
        return function(*args)

    def pid(self):
        return os.getpid()


def _rank():
    return ray.remote(num_cpus=0)(Rank).remote()


class Members:
    """Actors, and the calls on all of them."""

    def __init__(self, actors):
        self.actors = actors

    def __len__(self):
        return len(self.actors)

    def start(self, function, *args):
        return [actor.do.remote(function, rank, *args) for rank, actor in enumerate(self.actors)]

    def all(self, function, *args):
        """Runs `function(rank, *args)` on all actors, and returns their results by rank."""
        return ray.get(self.start(function, *args), timeout=PATIENCE)

    def errors(self, function, *args):
        """Runs `function(rank, *args)` on all actors, and returns what each raises, or None."""
        found = []
        for ref in self.start(function, *args):
            try:
                ray.get(ref, timeout=PATIENCE)
                found.append(None)
            except ray.exceptions.RayTaskError as error:
                found.append(error.cause)
            except ray.exceptions.RayActorError as error:
                found.append(error)
        return found


@pytest.fixture(scope="session")
def pool(cluster):
    actors = [_rank() for _ in range(POOL)]
    ray.get([actor.pid.remote() for actor in actors], timeout=PATIENCE)
    yield Members(actors)
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def fresh(cluster):
    """Makes actors for one test, which may end them."""
    made = []

    def make(size):
        made.extend(_rank() for _ in range(size))
        return Members(made[-size:])

    yield make
    for actor in made:
        ray.kill(actor)


@pytest.fixture
def name():
    """A group's name that no other test uses. After the test, checks that nothing is left under it."""
    name = f"group-{next(_numbers)}"
    yield name
    assert left(name) == []


def left(name):
    """What is left of a group: its keys in Ray's store, and Ray's detached actor."""
    from allstream.ray.store import all_keys

    keys = [key for key in all_keys() if f"/{name}/" in key]
    try:
        ray.get_actor(f"info_{name}")
        keys.append("detached actor")
    except ValueError:
        pass
    return keys


def warm():
    """Imports in an actor what its first use of a group would import."""
    import torch  # noqa: F401

    import allstream.ray
    import ray.util.collective  # noqa: F401

    allstream.ray.register()


def join(rank, world, name, timeout=30_000):
    import ray.util.collective as col

    col.init_collective_group(world, rank, "allstream", name, timeout)


def leave(_rank, name):
    import ray.util.collective as col

    if col.is_group_initialized(name):
        col.destroy_collective_group(name)


@pytest.fixture
def group(pool, name):
    """The pool as a group of all its actors."""
    pool.all(join, POOL, name)
    yield name
    pool.all(leave, name)


@pytest.fixture
def helpers():
    """Functions that several test modules use."""
    return _THIS


if ray is not None:
    ray.cloudpickle.register_pickle_by_value(_THIS)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)


def go_on(pid):
    os.kill(pid, signal.SIGCONT)
