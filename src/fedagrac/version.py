"""The version of the package. Importing it loads nothing else."""

__version__ = "0.1.0"
