"""What is known to be right: the judge, what is held against it, and the record of what was."""
