"""Training of models, by scripts such as `python -m train.sft`."""

import os
import signal
import sys


if sys.argv[0] == "-m":  # while a script's imports take seconds; later `train.base.stop` handles this and other signals
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
