"""Experiment files that ship with the package."""
