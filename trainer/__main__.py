"""`python -m trainer` is `train`."""

import signal

# Ctrl-C during the imports ends the process without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from trainer.cli import main

if __name__ == "__main__":
    main()
