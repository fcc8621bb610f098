"""The command `fedagrac`, one module per command.

`options.py` holds the options that commands share, `computing.py` what commands that compute share, `printing.py`
how commands print. Modules here import torch only inside functions, so that help, the version and wrong usage
answer at once.
"""
