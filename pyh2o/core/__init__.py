"""Models and texts: the base of all other packages."""
