"""The stub file names what the compiled module has, and everything that is public has a docstring."""

import ast
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


@pytest.mark.parametrize("name", CLASSES)
def test_everything_public_is_documented(name):
    made = getattr(allstream, name)
    assert made.__doc__
    assert [method for method in public(vars(made)) if not getattr(made, method).__doc__] == []
