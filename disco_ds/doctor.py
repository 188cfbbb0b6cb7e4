"""Entry point for `deepspeed --module disco_ds.doctor` and torchrun; the same as `disco-ds doctor`."""

import sys

from disco_ds.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
