"""The theory, computable: what can be known of a run before it is run.

Data sets, engines and run folders may not enter: only problems that are given as numbers.
"""
