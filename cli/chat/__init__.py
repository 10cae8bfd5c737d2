"""`pyh2o chat`."""
