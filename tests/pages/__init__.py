"""The pages of the documentation: their scripts, the examples of docstrings, the table of names, the built site."""
