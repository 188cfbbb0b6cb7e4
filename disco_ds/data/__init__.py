"""The data room: samples in, micro-batches out, in an order that depends on nothing but the seed and the sources.

    base        what a source provides         source      those of a recipe: found, mixed, opened
    manifest    tar shards as a source         table       a csv of image paths as a source
    folder      images in class sub-folders    synthetic   random pixels and tokens
    listing     which shards a setting means   counting    their samples, for `disco-ds index`
    tar         random access to a shard       fetching    remote shards, from URLs and commands
    ahead       which to fetch before their turn   shard_cache  where they are kept
    keyed       random numbers by key          decode      bytes -> image, caption
    order       which sample comes when        mixture     the same for several sources
    worker      decoding processes             shared_batches  the memory they write into
    feed        from there to the device       staging     how many micro-batches wait, and where
    loader      a rank's stream of them        step_data   the micro-batches of a step
    augment     images, on the device          sequential  every sample once, for evaluation
    broken      samples that are skipped

Of the package it imports only the settings. It takes (rank, size) as integers and never communicates.
"""

from disco_ds.data.augment import augment
from disco_ds.data.base import Reader, SampleForm, Source
from disco_ds.data.broken import BrokenSample, DataError
from disco_ds.data.counting import index_shards
from disco_ds.data.decode import ImageSpec
from disco_ds.data.folder import ImageFolder, sort_labels
from disco_ds.data.keyed import keyed_uniform
from disco_ds.data.listing import Listing, list_shards, resolve_shards
from disco_ds.data.loader import Loader, merge_states
from disco_ds.data.manifest import Manifest, Shard, load_manifest, write_manifest
from disco_ds.data.mixture import Mixture
from disco_ds.data.order import DataOrder, Share, choose_slots, divide
from disco_ds.data.sequential import read_all, read_labels
from disco_ds.data.source import fingerprint, load_sources
from disco_ds.data.staging import Staging
from disco_ds.data.step_data import MicroBatch, StepData
from disco_ds.data.table import Table

__all__ = [
    "BrokenSample",
    "DataError",
    "DataOrder",
    "ImageFolder",
    "ImageSpec",
    "Listing",
    "Loader",
    "Manifest",
    "MicroBatch",
    "Mixture",
    "Reader",
    "SampleForm",
    "Shard",
    "Share",
    "Source",
    "Staging",
    "StepData",
    "Table",
    "augment",
    "choose_slots",
    "divide",
    "fingerprint",
    "index_shards",
    "keyed_uniform",
    "list_shards",
    "load_manifest",
    "load_sources",
    "merge_states",
    "read_all",
    "read_labels",
    "resolve_shards",
    "sort_labels",
    "write_manifest",
]
