"""The command line: `disco-ds COMMAND ...`, the same as `python -m disco_ds COMMAND ...`."""

from __future__ import annotations

import sys

COMMANDS = {
    "train": "train a recipe (under `deepspeed --module disco_ds.train` for several ranks)",
    "launch": "train unattended: `deepspeed` on one or several hosts, ended cleanly and started again",
    "eval": "zero-shot accuracy and retrieval of a run, a checkpoint, an export or open_clip's weights",
    "export": "write trained weights as open_clip loads them",
    "report": "draw report.png of a run, finished or not",
    "doctor": "look at a run before it is started: packages, hosts, ds_config, batch, data, and --gradients",
    "plan": "memory of each GPU by part, the largest batch that fits, the time of a step; no GPU needed",
    "index": "count the samples of shards, once, into their manifest; --check whether it still holds",
}


def main() -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        asked = len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help")
        print(f"usage: disco-ds COMMAND ...\n{listing}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    command, rest = sys.argv[1], sys.argv[2:]
    if command == "index":
        from disco_ds.cli.index import main as index

        return index(rest)
    if command == "report":
        from disco_ds.cli.report import main as report

        return report(rest)
    if command == "doctor":
        from disco_ds.doctor.__main__ import main as doctor

        return doctor(rest)
    if command == "launch":
        from disco_ds.cli.launch import main as launch

        return launch(rest)
    if command == "eval":
        from disco_ds.cli.evaluate import main as evaluate

        return evaluate(rest)
    if command == "export":
        from disco_ds.cli.export import main as export

        return export(rest)
    if command == "plan":
        from disco_ds.cli.plan import main as plan

        return plan(rest)
    if "--dry-run" in rest:
        return dry_run(rest)
    from disco_ds.cli.train import main as train

    return train(rest)


def dry_run(argv: list[str]) -> int:
    """Print the resolved settings of `train --dry-run`, without importing open_clip and the trainer."""
    from disco_ds.cli.arguments import describe_run, parse_args
    from disco_ds.config import load_config
    from disco_ds.distributed.hostfile import count_ranks

    args = parse_args(argv)
    try:
        print(describe_run(load_config(args.config, args.overrides), count_ranks(args.ranks, args.hostfile)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
