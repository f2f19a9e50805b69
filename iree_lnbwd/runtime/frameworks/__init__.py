"""Other libraries' arrays: what is known of them, and how they are made."""
