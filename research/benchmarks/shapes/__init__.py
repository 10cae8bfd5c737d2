"""Architectures that `random_model.py` writes models of, one in a file: fields and tensors."""
