"""Conversations and stories, and their session files."""
