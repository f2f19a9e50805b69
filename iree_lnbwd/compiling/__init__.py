"""How a spec becomes a module: its text, its host program, and the compiler."""
