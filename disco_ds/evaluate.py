"""Entry point for `deepspeed --module disco_ds.evaluate` and torchrun; the same as `disco-ds eval`."""

import sys

from disco_ds.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
