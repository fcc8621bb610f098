"""Storage: checkpoints, run folders, files of sweeps and claims on folders, which only this room reads and writes."""
