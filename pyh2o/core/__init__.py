"""A model and its texts: what everything else is built on."""
