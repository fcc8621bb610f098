"""The soak measures every promise of the package about long runs, many clients and large models."""
