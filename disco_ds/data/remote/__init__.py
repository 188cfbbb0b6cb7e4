"""Remote shards: fetched whole, cached on the host's disk, and prefetched."""
