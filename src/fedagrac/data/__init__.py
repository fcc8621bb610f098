"""Data: federations, partitions, batches, pictures, and the files of data sets."""

from fedagrac.data.disk import DiskArray
from fedagrac.data.federation import DATASETS, ClientTests, Federation
from fedagrac.data.partitions import IID, Dirichlet, Indices, Natural, Partition, Resample, Shards
from fedagrac.data.pictures import Images

__all__ = [
    "DATASETS",
    "IID",
    "ClientTests",
    "Dirichlet",
    "DiskArray",
    "Federation",
    "Images",
    "Indices",
    "Natural",
    "Partition",
    "Resample",
    "Shards",
]
