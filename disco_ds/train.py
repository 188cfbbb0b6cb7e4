"""Entry point for `deepspeed --module disco_ds.train` and torchrun; the same as `disco-ds train`."""

import sys

from disco_ds.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
