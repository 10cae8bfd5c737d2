"""`pyh2o generate`."""
