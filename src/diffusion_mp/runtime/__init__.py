"""What the library has to know of the interpreter and of torch while it runs; nothing here knows of graphs."""
