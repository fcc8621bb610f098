"""The soak: what the package promises about long runs, many clients and large models, measured in full."""
