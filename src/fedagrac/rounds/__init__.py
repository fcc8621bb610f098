"""The round loop: servers, fleets, and everything that happens between two rounds."""
