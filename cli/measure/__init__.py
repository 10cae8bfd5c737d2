"""`pyh2o bench` and `pyh2o eval`."""
