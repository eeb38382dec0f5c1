"""Tables of results: how their settings are searched, how they are trained, kept and shown (extra `train`)."""
