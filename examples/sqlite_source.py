"""A custom data source: pairs from a SQLite table (docs/extending.md)."""

import sqlite3
from itertools import accumulate

from disco_ds.data import BrokenSample, Source, divide


class Pairs(Source):
    """The rows of a table with the columns image (bytes of a JPEG or PNG) and caption, rowid 1 to n."""

    def __init__(self, path: str, table: str = "pairs"):
        self.path, self.table = path, table
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            (count,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
        self.sizes = divide(count)  # the table has no shards: divide it into enough for many ranks
        self.fingerprint = f"{table}-{count}"

    def open(self, num_slots: int, window: int) -> "Rows":
        return Rows(self)


class Rows:
    """Reads rows in the process that opened it."""

    def __init__(self, pairs: Pairs):
        self.database = sqlite3.connect(f"file:{pairs.path}?mode=ro", uri=True)
        self.query = f"SELECT image, caption FROM {pairs.table} WHERE rowid = ?"
        self.first = list(accumulate(pairs.sizes, initial=1))  # rowid at which each shard begins

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        row = self.database.execute(self.query, (self.first[shard] + entry,)).fetchone()
        if row is None or row[0] is None:
            raise BrokenSample("the row has no image")
        return {"png": row[0], "txt": row[1].encode()}

    def name(self, shard: int, entry: int) -> str:
        return f"row {self.first[shard] + entry}"

    def close(self) -> None:
        self.database.close()
