"""The attack replays what one bad node, a received folder or a wrong environment can do, on loopback only."""
