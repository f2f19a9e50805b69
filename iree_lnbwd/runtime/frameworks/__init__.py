"""Other libraries' arrays: how they are read and made."""
