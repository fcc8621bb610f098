"""`python -m fedagrac` is the command `fedagrac`."""

from fedagrac.cli.app import main

main()
