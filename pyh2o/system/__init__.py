"""Files, memory and threads of the machine."""
