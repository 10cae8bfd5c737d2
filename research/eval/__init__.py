"""Quality loss of a cache with eviction: fidelity, recall and stories.

Caches, each a policy with a budget, are compared with the full cache. The measurements need a model
and at most a text, but no network:

* fidelity.py: how far predictions for a text differ from those of the full cache;
* recall.py: RULER's synthetic tasks (tasks.py), which ask for facts in a long text;
* stories.py: how repetitive and how likely generated stories are.

Each is a measurement (measurement.py), whose units go to a file that a later run continues.
"""
