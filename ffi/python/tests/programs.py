"""The programs with which docs/python.md begins: each is copied into a file, and run as its text says."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def program(name, folder):
    """Writes the program of this name into a folder; its path."""
    text = (REPOSITORY / "docs/python.md").read_text()
    (found,) = re.findall(rf"```python\n(# {re.escape(name)}\n.*?)```", text, re.DOTALL)
    path = folder / name
    path.write_text(found)
    return path
