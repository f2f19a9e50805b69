"""The ops as functions: which module answers a call, and the call itself."""
