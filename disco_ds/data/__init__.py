"""The data room: webdataset shards in, micro-batches out, in an order that depends on nothing but seed and shards.

    keyed       random numbers by key          tar         random access to a shard's samples
    order       which sample comes when        mixture     the same for several sources
    listing     which shards a setting means   manifest    how many samples each has
    counting    them, for `disco-ds index`     remote      shards that are fetched
    table       a csv of image paths           folder      images in class sub-folders
    decode      bytes -> image, caption        source      all of them, or random pixels
    augment     images, on the device          worker      decoding processes
    feed        from them to the device        shared_batches  the memory they write into
    staging     how many wait, and where
    loader      a rank's stream of them        step_data   the micro-batches of a step
    sequential  every sample once, for evaluation

It imports the settings alone of the package, takes (rank, size) as integers and never communicates.
"""

from disco_ds.data.augment import augment
from disco_ds.data.counting import index_shards
from disco_ds.data.decode import ImageSpec
from disco_ds.data.folder import ImageFolder, scan_folder, sort_labels
from disco_ds.data.keyed import keyed_uniform
from disco_ds.data.listing import Listing, list_shards, resolve_shards
from disco_ds.data.loader import Loader, merge_states
from disco_ds.data.manifest import Manifest, Shard, load_manifest, write_manifest
from disco_ds.data.mixture import Mixture
from disco_ds.data.order import DataOrder, Share, choose_slots
from disco_ds.data.sequential import read_all, read_labels
from disco_ds.data.source import SampleForm, fingerprint, load_sources
from disco_ds.data.staging import Staging
from disco_ds.data.step_data import MicroBatch, StepData
from disco_ds.data.table import Table
from disco_ds.data.tar import BrokenSample, DataError

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
    "SampleForm",
    "Shard",
    "Share",
    "Staging",
    "StepData",
    "Table",
    "augment",
    "choose_slots",
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
    "scan_folder",
    "sort_labels",
    "write_manifest",
]
