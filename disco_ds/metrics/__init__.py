"""Metrics of a run: log records, times of the phases, anomalies, the report, and trackers."""
