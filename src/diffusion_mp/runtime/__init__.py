"""What the library has to know about the interpreter and torch while it runs; nothing here knows about graphs."""
