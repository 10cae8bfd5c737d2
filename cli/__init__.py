"""The command line of pyh2o: it parses, calls the library and prints.

Text goes to stdout, everything else to stderr.
"""
