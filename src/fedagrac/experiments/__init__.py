"""Experiments: their files, from tables to objects, running them, sweeps, studies and benchmarks."""
