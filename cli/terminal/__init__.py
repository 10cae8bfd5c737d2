"""Terminal output shared by all commands."""
