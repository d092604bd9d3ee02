"""`python -m trainer` is `train`."""

import sys

# `-m` puts the current folder first, where a file that lies there would be taken for an installed
# package, or for a module of Python's own. It comes back last, as with `train`: for one's own code.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

import signal

# Ctrl-C ends the process without a traceback until the command line has been read.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from trainer.cli.main import main

if __name__ == "__main__":
    main()
