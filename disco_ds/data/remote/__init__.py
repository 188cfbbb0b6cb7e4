"""Shards on other machines: fetched, cached on the host's disk, and prefetched."""
