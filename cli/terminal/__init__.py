"""What every command shows on a terminal."""
