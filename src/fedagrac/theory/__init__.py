"""The paper's theory as numbers: the right-hand sides of its theorems, and the constants they need."""
