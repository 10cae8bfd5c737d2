"""Texts that outlive a process: conversations, stories, and the files they are kept in."""
