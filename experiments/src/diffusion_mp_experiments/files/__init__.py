"""Files from anywhere, read as data: nothing in them is run, and damaged files are refused in one sentence."""
