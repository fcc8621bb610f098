"""The mathematics: the local rule, cohorts, random streams and schedules. It imports torch and numpy only."""
