"""One file a memory feature: what it saves, what it costs, what it excludes."""
