"""What a .vmfb is: its code, its description of itself, and the manifest beside it."""
