"""`python -m fedagrac` is the command `fedagrac`."""

from fedagrac.cli import main

main()
