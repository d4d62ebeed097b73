"""The `allstream` command, for example `python -m allstream run -n 2 -- python program.py`; `python -m allstream --help` names the rest."""

import os
import signal
import sys

if not __package__:
    # This file was started by its path: so the command starts itself again, as an agent, a guard or a rank of the demo. Python has put this
    # file's own folder first in sys.path; `import allstream` needs the folder that holds it.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from allstream import _native


def main():
    # The launcher handles signals itself and hands them to the ranks; Python's handler of SIGINT would raise KeyboardInterrupt besides. SIGXFSZ
    # is ignored by Python, and the ranks would inherit that.
    for number in (signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(_native.run_command([sys.executable, os.path.abspath(__file__)], sys.argv[1:]))


if __name__ == "__main__":
    main()
