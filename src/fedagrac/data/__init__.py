"""Data: federations, partitions, batches, pictures, and the files of data sets."""

from fedagrac.data.federation import DATASETS, Federation
from fedagrac.data.partitions import IID, Dirichlet, Indices, Natural, Partition, Resample, Shards

__all__ = ["DATASETS", "IID", "Dirichlet", "Federation", "Indices", "Natural", "Partition", "Resample", "Shards"]
