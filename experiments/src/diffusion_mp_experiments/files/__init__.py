"""Files from anywhere, read as data: nothing in them is run, and what is damaged is refused in one sentence."""
