"""The stub file names what the compiled module has, and everything that is public has a docstring."""

import ast
import inspect
from pathlib import Path

import pytest

import allstream
from allstream import _native

STUB = ast.parse((Path(allstream.__file__).parent / "_native.pyi").read_text()) if (Path(allstream.__file__).parent / "_native.pyi").exists() else None
CLASSES = ["Work", "HostStream", "Verdict", "Comm", "Buckets"]


def public(names):
    return {name for name in names if not name.startswith("_")}


@pytest.mark.skipif(STUB is None, reason="the stub file is not beside the package")
@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_what_the_stub_says(name):
    (found,) = [node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == name]
    told = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    told |= {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}
    assert public(told) == public(vars(getattr(_native, name)))


# What a call takes as `**options`: the stub may name some of them.
OPTIONS = {"timeout", "algo", "key", "after", "op", "scale", "deterministic", "tag", "options"}


def parameters(function, without):
    """Name, kind and default of each parameter, in their order, but `self` and those that are left out."""
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in found if one.name not in {"self"} | without]


@pytest.mark.skipif(STUB is None, reason="the stub file is not beside the package")
@pytest.mark.parametrize("name", ["Work", "HostStream", "Comm", "Buckets"])
def test_methods_take_what_the_stub_says(name):
    stub = {}
    exec(compile(STUB, "_native.pyi", "exec"), stub)  # noqa: S102: it is the package's own.
    told, made = vars(stub[name]), vars(getattr(_native, name))
    methods = [method for method in public(told) if inspect.isfunction(told[method])]
    assert methods
    for method in methods:
        without = OPTIONS if "options" in inspect.signature(made[method]).parameters else set()
        assert parameters(told[method], without) == parameters(made[method], without), method


@pytest.mark.parametrize("name", CLASSES)
def test_everything_public_is_documented(name):
    made = getattr(allstream, name)
    assert made.__doc__
    assert [method for method in public(vars(made)) if not getattr(made, method).__doc__] == []
