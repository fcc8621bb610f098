"""What lies on disk: checkpoints, run folders and the claims on them. Written and read here, nowhere else."""
