"""The round loop: servers, fleets, and what happens between two rounds."""
