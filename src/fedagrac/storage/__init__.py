"""Storage: checkpoints, run folders, files of sweeps and claims on folders, all written and read here only."""
