"""The ways in which workers come to know the backend, each in a job of its own."""

import json
import subprocess
import sys
import textwrap

import apart
import pytest
import ray.experimental.rdt.util

HEAD = """
    import numpy, ray, allstream.ray

    def use(group):
        import ray.util.collective as col
        x = numpy.ones(1)
        col.allreduce(x, group)
        return float(x[0])

    def init(rank, group):
        import ray.util.collective as col
        col.init_collective_group(2, rank, "allstream", group)

    class Actor:
        def do(self, function, *args):
            return function(*args)

    def start():
        return [ray.remote(num_cpus=0)(Actor).remote() for _ in range(2)]

    def both(actors, function, *args):
        return ray.get([actor.do.remote(function, *args) for actor in actors], timeout=60)

    OPTIONS = dict(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
"""


def script(body, **environment):
    text = textwrap.dedent(HEAD) + textwrap.dedent(body)
    with apart.environment() as kept:
        done = subprocess.run([sys.executable, "-c", text], env={**kept, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_before_init_and_again_after_shutdown():
    done = script("""
        allstream.ray.register()
        allstream.ray.register()
        for _ in range(2):
            ray.init(runtime_env={"env_vars": {"OF_THE_PROGRAM": "1"}}, **OPTIONS)
            actors = start()
            ray.get([actor.do.remote(init, rank, "g") for rank, actor in enumerate(actors)], timeout=60)
            print(both(actors, use, "g"), both(actors, lambda: __import__("os").environ["OF_THE_PROGRAM"]))
            ray.shutdown()
    """)
    assert done.stdout.splitlines() == ["[2.0, 2.0] ['1', '1']"] * 2


def test_the_transport_is_made_known_while_the_program_imports_rays_module():
    """Ray registers it on a thread of its own. That must neither wait for what the program's thread is importing, nor break that import."""
    module = ray.experimental.rdt.util.transport_manager_info["ALLSTREAM"].transport_manager_class.__module__
    done = script(f"""
        import importlib, threading
        from allstream.ray import hook
        midway, go_on, got = threading.Event(), threading.Event(), []

        def pause():
            midway.set()
            assert go_on.wait(60)

        hook._after_import("ray.util.collective.types", pause)
        program = threading.Thread(target=lambda: got.append(allstream.ray.init_collective_group.__name__), daemon=True)
        program.start()
        assert midway.wait(60)
        rays = threading.Thread(target=lambda: got.append(importlib.import_module({module!r}).__name__), daemon=True)
        rays.start()
        rays.join(20)
        print(got)
        go_on.set()
        program.join(60)
        print(got)
        import ray.util.collective as col
        print(col.is_backend_available("ALLSTREAM"))
    """)
    assert done.stdout.splitlines() == [f"['{module}']", f"['{module}', 'init_collective_group']", "True"], done.stderr[-3000:]


def test_workers_that_do_not_communicate_import_nothing():
    done = script("""
        allstream.ray.register()
        ray.init(**OPTIONS)
        names = ["torch", "ray.util.collective", "allstream.ray.group"]
        print(both(start(), lambda: [name in __import__("sys").modules for name in names + ["allstream.ray"]])[0])
    """)
    assert done.stdout.splitlines() == ["[False, False, False, True]"]


def test_after_init():
    done = script("""
        ray.init(**OPTIONS)
        actors = start()
        allstream.ray.create_collective_group(actors, 2, [0, 1], group_name="g")
        print(both(actors, use, "g"))
        allstream.ray.register()
        import ray.util.collective as col
        try:
            ray.get(start()[0].do.remote(init, 0, "h"), timeout=60)
        except ValueError as error:
            print("not registered" in str(error))
        def in_actor(rank):
            import allstream.ray
            init(rank, "h")
            return use("h")
        actors = start()
        print(ray.get([actor.do.remote(in_actor, rank) for rank, actor in enumerate(actors)], timeout=60))
    """)
    assert done.stdout.splitlines() == ["[2.0, 2.0]", "True", "[2.0, 2.0]"]
    assert "was called after ray.init()" in done.stderr


@pytest.mark.parametrize("first", ["allstream.ray.group", "allstream.ray.refs", "allstream.ray.calls", "ray.util.collective", "torch"])
def test_whatever_is_imported_first(first):
    """The submodules import each other, and also the modules whose imports they watch; any order must work, also after a library has asked
    whether the module is there."""
    done = subprocess.run(
        [sys.executable, "-c", f"""
import importlib.util, allstream.ray
assert importlib.util.find_spec({first!r}) and importlib.util.find_spec("torch")
importlib.import_module({first!r})
import torch, ray.util.collective as col
from ray.experimental.rdt.util import transport_manager_info
print(col.is_backend_available("ALLSTREAM"), "ALLSTREAM" in transport_manager_info)
"""],
        capture_output=True, text=True, timeout=60,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_beside_a_hook_of_the_program():
    done = script(
        """
        try:
            allstream.ray.register()
        except RuntimeError as error:
            print(error)
        """,
        RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps({"runtime_env": {"worker_process_setup_hook": "mine.hook"}}),
    )
    assert "'mine.hook'" in done.stdout and "in that function" in done.stdout


@pytest.mark.parametrize("module", ["torch", "numpy", "ray.util.collective"])
def test_importing_is_cheap(module):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, allstream.ray; print({module!r} in sys.modules)"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr
