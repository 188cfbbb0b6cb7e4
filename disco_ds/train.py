"""The trainer as `deepspeed --module disco_ds.train` and torchrun name it; the loop is in training/loop.py."""

import sys

from disco_ds.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
