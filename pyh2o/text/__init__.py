"""Text and tokens: prompts, chat templates, and from tokens back to text."""
