"""What an op is: its operands, spec, element types and arguments."""
