"""Operations on many lanes that a GPU with Triton runs as one kernel each; elsewhere torch runs them."""
