"""The data room: webdataset shards in, micro-batches out, in an order that depends on nothing but seed and shards.

    keyed       random numbers by key          tar         random access to a shard's samples
    order       which sample comes when        manifest    the shards of a folder, counted once
    decode      bytes -> image, caption        source      shards, or random pixels
    augment     images, on the device          worker      decoding processes
    loader      a rank's micro-batches         sequential  every sample once, for evaluation
    folder      images in class sub-folders

It imports disco_ds.config alone of the package, takes (rank, size) as integers and never communicates.
"""

from disco_ds.data.augment import augment
from disco_ds.data.decode import ImageSpec
from disco_ds.data.folder import ImageFolder, scan_folder, sort_labels
from disco_ds.data.keyed import keyed_uniform
from disco_ds.data.loader import Loader, MicroBatch, StepData, merge_states
from disco_ds.data.manifest import Manifest, Shard, index_shards, load_manifest, resolve_shards, write_manifest
from disco_ds.data.order import DataOrder, choose_slots
from disco_ds.data.sequential import read_all, read_labels
from disco_ds.data.tar import BrokenSample

__all__ = [
    "BrokenSample",
    "DataOrder",
    "ImageFolder",
    "ImageSpec",
    "Loader",
    "Manifest",
    "MicroBatch",
    "Shard",
    "StepData",
    "augment",
    "choose_slots",
    "index_shards",
    "keyed_uniform",
    "load_manifest",
    "merge_states",
    "read_all",
    "read_labels",
    "resolve_shards",
    "scan_folder",
    "sort_labels",
    "write_manifest",
]
