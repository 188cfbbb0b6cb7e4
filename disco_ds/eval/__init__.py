"""Evaluation over all ranks: every rank takes its part of a set and all make the same number of forwards."""

from disco_ds.eval.zero_shot import Accuracy, LabelledSet, classify_sets, load_sets

__all__ = ["Accuracy", "LabelledSet", "classify_sets", "load_sets"]
