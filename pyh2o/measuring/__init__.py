"""Caches side by side: how fast they are, what they take, and what an evicting one loses.

* caches.py: one record of a cache under test, the rows of a budget, and how it is opened;
* model.py: what is known of a model, and texts in its tokens;
* measurement.py: the outline of a measurement, from what is wanted to its tables;
* results.py, tables.py, pictures.py: where figures go;
* quality: fidelity, recall, instructions and stories, each such a measurement;
* speed: all caches by turns, in a process each. Its files are not gone on with by a later run,
  because only rounds that were measured by turns can be compared.
"""
