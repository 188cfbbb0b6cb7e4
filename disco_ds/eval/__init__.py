"""Evaluation on all ranks, each of which encodes its share of every set.

sets        loading and evaluating all sets   zero_shot   accuracy on a set with labels
encode      features of images and texts      pairs       retrieval, and the loss on held-out pairs
results     what is recorded and printed      probes      accuracy of classifiers of image features
"""

from disco_ds.eval.encode import Encoder, ImageSet
from disco_ds.eval.results import Result, describe, record
from disco_ds.eval.sets import evaluate_sets, load_sets
