"""C++ of the package, and what Python prepares for it."""
