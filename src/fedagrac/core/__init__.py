"""The mathematics: the local rule, cohorts, random streams and schedules. Torch and numpy only."""
