"""Training data: samples are read and delivered as micro-batches.

The order of the samples depends only on the seed, the sources and the settings.

    order.py                          the order in which samples are read
    sources                           where samples come from, and how remote shards are fetched and cached
    captions.py, images.py, stored.py caption, pixels and stored embeddings of a sample
    samples.py                        a sample as named arrays, and how it is prepared
    worker.py, loader.py              worker processes, and the loader of a rank
    sequential.py, embed.py           reading for evaluation, and storing of embeddings

This package imports only `config` and `names` from the rest of disco_ds. It receives the rank and the number of ranks
as arguments, and never communicates with other ranks.
"""

from disco_ds.data.batches import MicroBatch, Share, Staging, StepData
from disco_ds.data.errors import BrokenSample, DataError
from disco_ds.data.images import ImageSpec, augment
from disco_ds.data.loader import Loader, merge_states
from disco_ds.data.order import divide
from disco_ds.data.samples import InputSpec
from disco_ds.data.sequential import read_all, read_labels
from disco_ds.data.sources.base import Reader, Source
from disco_ds.data.sources.counting import index_shards
from disco_ds.data.sources.files import CaptionedImages, ImageFolder, Table, sort_labels
from disco_ds.data.sources.load import count_epoch, fingerprint, load_sources
from disco_ds.data.sources.shards import (
    Manifest,
    Shard,
    is_table,
    load_manifest,
    resolve_shards,
    write_manifest,
)
