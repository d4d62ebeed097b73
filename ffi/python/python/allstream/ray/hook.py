"""How every process of a job comes to know the backend "allstream".

A backend of Ray's must be registered in the driver and in each worker. `register()` registers in the driver at once, and names this
module's function `setup` as the job's `worker_process_setup_hook`, which Ray runs in every worker process as the process starts:

* Before `ray.init`, the hook's name is put into the environment variable from which `ray.init` takes a job's configuration. Ray merges
  that with the `runtime_env` of the program, so both apply, also after `ray.shutdown()` and another `ray.init()`.
* After `ray.init`, a job's configuration cannot be changed. `allstream.ray.create_collective_group` then registers on its actors
  by itself, and importing `allstream.ray` registers in the importing process. So a program which calls the functions of this
  package, and not those of `ray.util.collective`, need not call `register()`.

A worker registers only when its program imports `ray.util.collective`. That import takes seconds, as it imports torch, so a worker
that never communicates starts as fast as before.
"""

import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
from typing import Any, Callable, Dict

import ray

logger = logging.getLogger(__name__)

BACKEND = "ALLSTREAM"
HOOK = "allstream.ray.hook.setup"
# Ray's name of the variable by which a job's configuration reaches `ray.init`.
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Ray's own backends. If a program names one of them, `allstream.ray` makes a group of allstream's, which does what both backends do.
_OF_RAY = ("NCCL", "GLOO")
_HOOK_FIELD = "worker_process_setup_hook"


def register() -> None:
    """Makes "allstream" a backend of `ray.util.collective`, and a tensor transport, in this process and in all workers of its job.

    Call it before `ray.init()`; calling it again changes nothing. A program that has a `worker_process_setup_hook` of its own
    calls `allstream.ray.register()` in that hook.

    Raises:
        RuntimeError: the job already has another `worker_process_setup_hook`.
    """
    if not _is_worker():
        _name_hook()
        if ray.is_initialized() and not _job_has_hook():
            logger.warning(
                "allstream.ray.register() was called after ray.init(): the workers of this job do not know the backend. "
                "Call it before ray.init(), or make groups by allstream.ray.create_collective_group."
            )
    register_here()


def backend_here(name: str) -> str:
    """The backend that a function of `allstream.ray` uses where a program asks for `name`."""
    return BACKEND if name.upper() in _OF_RAY else name


def setup() -> None:
    """What Ray runs in each worker process: registers as soon as the program imports Ray's collectives."""
    _after_import("ray.util.collective.collective", _register_all)


def register_here() -> None:
    """Registers in this process, now."""
    # Imports the whole package: the import of a submodule would not wait for another thread that is importing the package.
    importlib.import_module("ray.util.collective")
    _register_all()


def _watch() -> None:
    """What importing `allstream.ray` does in a driver: registers as soon as the program imports Ray's collectives, or torch."""
    _after_import("ray.util.collective.collective", _register_all)
    # A class may name the tensor transport before the program imports Ray's collectives.
    _after_import("torch", _register_transport)


def _register_all() -> None:
    _register_group()
    _register_transport()


def _register_group() -> None:
    # The module registers its backend while it is imported. Its import may be under way already, and may have caused this call.
    importlib.import_module("allstream.ray.group")


def _register_transport() -> None:
    try:
        importlib.import_module("allstream.ray.transport").register()
    except ImportError as missing:
        # Ray Direct Transport is alpha. With a Ray that names its parts otherwise, groups work, and allstream's ObjectRefs do not. Or Ray's
        # module is just importing torch: then this is called again when that module has been imported.
        logger.debug("allstream.ray: no tensor transport, as this Ray has none that is known here: %s", missing)


def _is_worker() -> bool:
    return ray._private.worker.global_worker.mode == ray.WORKER_MODE


def _job_has_hook() -> bool:
    runtime_env = ray.get_runtime_context().runtime_env
    return runtime_env.get(_HOOK_FIELD) == HOOK


def _name_hook() -> None:
    config = json.loads(os.environ.get(JOB_CONFIG) or "{}")
    runtime_env: Dict[str, Any] = config.setdefault("runtime_env", None) or {}
    there = runtime_env.setdefault(_HOOK_FIELD, HOOK)
    if there != HOOK:
        raise RuntimeError(
            f"allstream.ray.register(): this job already has the worker_process_setup_hook {there!r}; "
            "call allstream.ray.register() in that function instead"
        )
    config["runtime_env"] = runtime_env
    os.environ[JOB_CONFIG] = json.dumps(config)


def _after_import(module: str, action: Callable[[], None]) -> None:
    """Calls `action` when `module` has been imported; at once, if `sys.modules` has it already."""
    if module in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(module, action))


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the import of one module, which the usual finder and loader carry out."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module, self.action = module, action

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.module:
            return None
        # Whoever only asks whether the module is there (`importlib.util.find_spec`) does not import it, so the watch goes on until it is loaded.
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.action()


class _Then(importlib.abc.Loader):
    """Loads a module as its own loader does, and then calls the action."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self.loader, self.action = loader, action

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.action()


if _is_worker():
    setup()
else:
    _watch()
