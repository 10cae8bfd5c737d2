"""What a cache that evicts loses: fidelity, recall, dialogues, kept instructions and stories.

What is compared are caches, each a policy with a budget, and all of them with the full cache. What
is measured needs a model and at most a text, nothing from a network:

* fidelity.py: how far the predictions for a text move away from those of the full cache;
* recall.py: RULER's synthetic tasks and a few of our own (tasks.py), which ask for what stands
  somewhere in a long text;
* dialogue.py: what two people told each other in many sessions (talks.py), asked likewise;
* instructions.py: whether a system prompt is still followed after many turns, and kept secret;
* stories.py: how repetitive and how likely generated stories are.
"""
