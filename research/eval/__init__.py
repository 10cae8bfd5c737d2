"""What a cache that evicts loses: fidelity, recall and stories.

What is compared are caches, each a policy with a budget, and all of them with the full cache. What
is measured needs a model and at most a text, nothing from a network:

* fidelity.py: how far the predictions for a text move away from those of the full cache;
* recall.py: RULER's synthetic tasks (tasks.py), which ask for what stands somewhere in a long text;
* stories.py: how repetitive and how likely generated stories are.

Each is a measurement (measurement.py), whose units go to a file that a later run goes on with.
"""
