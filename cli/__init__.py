"""The command line of pyh2o. Text goes to stdout, everything else to stderr.

Commands import what loads llama.cpp when they run, because `--help` must not wait for it.
"""
