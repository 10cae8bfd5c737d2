"""From a prompt to a text: chat templates, sampling, grammars, and one loop that draws tokens."""
