"""Measure `disco-ds index` on a bucket with many shards, published sample counts and slow requests.

    python -m tools.bench.counting --shards 100000 --delay-ms 50           one stats file per shard, as by img2dataset
    python -m tools.bench.counting --shards 100000 --delay-ms 50 --table   one sizes.json, as in DataComp

The server is `rclone serve s3` on this host. A proxy in front of it delays every request. The shards are empty files,
because `disco-ds index` reads their names, sizes and published counts, but not their content. The tool calls the
command twice. The second call uses the manifest that the first call wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from helpers.object_store import KEY, SECRET, serve_rclone


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument(
        "--table",
        action="store_true",
        help="publish one sizes.json instead of one stats file per shard",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "bucket", "part")
        part.mkdir(parents=True)
        for number in range(args.shards):
            (part / f"{number:06d}.tar").touch()
            if not args.table:
                (part / f"{number:06d}_stats.json").write_text(
                    '{"count": 10000, "successes": 9000}'
                )
        if args.table:
            sizes = {f"{number:06d}.tar": 9000 for number in range(args.shards)}
            (part / "sizes.json").write_text(json.dumps(sizes))
        options = ("--auth-key", f"{KEY},{SECRET}")
        with serve_rclone("s3", Path(folder), *options, delay_s=args.delay_ms / 1e3) as proxy:
            environment = os.environ | {
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
                "AWS_REGION": "us-east-1",
                "DS_ACCELERATOR": "cpu",
            }
            shards = f"s3://bucket/part/{{000000..{args.shards - 1:06d}}}.tar"
            to = Path(folder, "manifest.json")
            command = [sys.executable, "-m", "disco_ds", "index", shards, "--to", str(to)]
            for name in ("first call", "second call"):
                before, requests, start = proxy.sent, proxy.received, time.perf_counter()
                subprocess.run(command, env=environment, check=True)
                print(
                    f"{name}: {time.perf_counter() - start:.1f} s, {proxy.received - requests:,} requests, "
                    f"{(proxy.sent - before) / 1e6:.1f} MB received"
                )


if __name__ == "__main__":
    main()
