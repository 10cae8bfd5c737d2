"""The command line of pyh2o. Text goes to stdout, everything else to stderr."""
