"""Data: federations, partitions, batch sampling."""

from fedagrac.data.federation import DATASETS, Federation
from fedagrac.data.partition import IID, Dirichlet, Partition, Shards

__all__ = ["DATASETS", "IID", "Dirichlet", "Federation", "Partition", "Shards"]
