"""Where samples come from: tar shards, csv files, image folders, synthetic data and custom sources."""
