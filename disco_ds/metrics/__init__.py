"""What a run says of itself, in its folder: records, times of the phases, the report."""
